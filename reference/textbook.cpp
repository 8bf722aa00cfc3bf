#include "reference/textbook.h"

#include <ATen/ATen.h>

#include <limits>

namespace longstraw::reference {

at::Tensor cut_before(const at::Tensor& rows, int64_t cut) {
  if (cut <= 0) return rows;
  return at::cat({rows.narrow(0, 0, cut).detach(), rows.narrow(0, cut, rows.size(0) - cut)}, 0);
}

at::Tensor for_each_head(const at::Tensor& x_SG, int64_t heads) { return at::repeat_interleave(x_SG, heads / x_SG.size(1), 1); }

at::ScalarType wide(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

at::Tensor softmax_attention(const at::Tensor& query_HSd, const at::Tensor& key_HSd, const at::Tensor& value_HSv,
                             const at::Tensor& visible_SS, double scale) {
  const at::ScalarType dtype = query_HSd.scalar_type();
  const at::Tensor scores_HSS = at::matmul(query_HSd, key_HSd.transpose(1, 2)) * scale;
  const at::Tensor masked_HSS = scores_HSS.masked_fill(at::logical_not(visible_SS), -std::numeric_limits<double>::infinity());
  const at::Tensor weights_HSS = at::softmax(masked_HSS, -1, wide(dtype)).to(dtype);
  return at::matmul(weights_HSS, value_HSv);
}

at::Tensor largest(const at::Tensor& scores_SE, int64_t k) {
  const at::NoGradGuard no_graph;
  const auto [sorted, index_SE] = at::sort(scores_SE, /*stable=*/true, /*dim=*/-1, /*descending=*/true);
  return index_SE.narrow(-1, 0, k).contiguous();
}

}  // namespace longstraw::reference
