#include "training/data_order.h"

#include "core/base/errors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

namespace longstraw::training {
namespace {

std::vector<int64_t> taken(DataOrder& order, DataPosition& at, int64_t count) {
  std::vector<int64_t> rows;
  for (int64_t n = 0; n < count; ++n) rows.push_back(order.take(at));
  return rows;
}

TEST(DataOrder, TakesEveryRowOnceAnEpoch) {
  DataOrder order(7, 3, true);
  DataPosition at;
  for (int64_t epoch = 0; epoch < 5; ++epoch) {
    const auto rows = taken(order, at, 7);
    EXPECT_EQ(std::set<int64_t>(rows.begin(), rows.end()).size(), 7u);
    EXPECT_EQ(at.epoch, epoch);
  }
}

TEST(DataOrder, EpochsAndSeedsHaveOtherOrders) {
  DataOrder order(50, 3, true), other(50, 4, true);
  DataPosition at, elsewhere;
  const auto first = taken(order, at, 50), second = taken(order, at, 50);
  EXPECT_NE(first, second);
  EXPECT_NE(first, taken(other, elsewhere, 50));
}

TEST(DataOrder, GoesOnFromAnyPositionAsIfNeverStopped) {
  DataOrder order(5, 3, true);
  DataPosition at;
  for (int64_t before = 0; before <= 15; ++before) {
    DataOrder resumed(5, 3, true);
    DataPosition from = at;
    DataOrder whole(5, 3, true);
    DataPosition start;
    taken(whole, start, before);
    EXPECT_EQ(taken(resumed, from, 12), taken(whole, start, 12)) << "after " << before;
    order.take(at);
  }
}

TEST(DataOrder, CountsDrawsAcrossEpochs) {
  DataOrder order(4, 1, true);
  DataPosition at;
  for (int64_t n = 0; n < 13; ++n) {
    EXPECT_EQ(order.count(at), n);
    order.take(at);
  }
}

TEST(DataOrder, WithoutShuffleIsTheFiles) {
  DataOrder order(3, 9, false);
  DataPosition at;
  EXPECT_EQ(taken(order, at, 5), (std::vector<int64_t>{0, 1, 2, 0, 1}));
}

TEST(DataOrder, RefusesAnEmptyDataSet) { EXPECT_THROW(DataOrder(0, 1, true), FormatError); }

TEST(Mixed, NeighboursShareNothing) {
  std::set<uint64_t> seen;
  for (uint64_t a = 0; a < 30; ++a) {
    for (uint64_t b = 0; b < 30; ++b) seen.insert(mixed(a, b));
  }
  EXPECT_EQ(seen.size(), 900u);
}

}  // namespace
}  // namespace longstraw::training
