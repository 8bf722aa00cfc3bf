#!/usr/bin/env python3
"""Writes a small random model whose prompts may be very long, for bench/long.py.

    python bench/tiny_model.py hybrid out/hybrid          gated delta rule, every fourth layer full attention (qwen3_5)
    python bench/tiny_model.py hybrid_inner out/inner     the same, the second of four layers full attention
    python bench/tiny_model.py recurrent out/recurrent    Mamba-2 alone
    python bench/tiny_model.py sparse out/sparse          latent attention over selected keys (deepseek_v32)

Small enough that a million tokens' attention ends within an hour on two cores, and its state fits in a few gigabytes.
"""
import argparse
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "fixtures"))

LONG = dict(vocab_size=256, hidden_size=32, max_position_embeddings=1 << 22)


def hybrid(**keys):
    import transformers
    config = transformers.Qwen3_5TextConfig(
        **LONG, intermediate_size=64, num_hidden_layers=4, num_attention_heads=1, num_key_value_heads=1, head_dim=16,
        linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2,
        rope_parameters=dict(rope_type="default", rope_theta=10000000.0, partial_rotary_factor=0.25), **keys)
    return transformers.Qwen3_5ForCausalLM, config


def hybrid_inner():
    """Of a prompt, the last layer's attention only keeps keys and values; an inner layer's attends over all of it."""
    return hybrid(layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"])


def recurrent():
    import transformers
    config = transformers.Mamba2Config(
        vocab_size=256, hidden_size=32, num_hidden_layers=4, num_heads=4, head_dim=16, state_size=16, n_groups=1, conv_kernel=4,
        chunk_size=64, expand=2, pad_token_id=None)
    return transformers.Mamba2ForCausalLM, config


def sparse():
    import transformers
    config = transformers.DeepseekV32Config(
        **LONG, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=24,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, index_topk=64, index_head_dim=16, index_n_heads=16)
    return transformers.DeepseekV32ForCausalLM, config


KINDS = {"hybrid": hybrid, "hybrid_inner": hybrid_inner, "recurrent": recurrent, "sparse": sparse}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("folder", type=pathlib.Path)
    options = parser.parse_args()
    from golden_variants import Variant
    from make_golden import build
    model_class, config = KINDS[options.kind]()
    options.folder.mkdir(parents=True, exist_ok=True)
    build(Variant(model_class, config)).save_pretrained(options.folder)


if __name__ == "__main__":
    main()
