"""Data that makes any configuration tiny: sizes by field name, and what single model types need beside them.

`tiny_config` applies `SIZES` to every integer field that a configuration class declares, and only downwards: a field
whose default is smaller already stays.  `OWN` is merged over the result for the types whose fields constrain each
other in ways that no rule by name can see.
"""

from __future__ import annotations

from typing import Any, Final

VOCABULARY: Final = 101
POSITIONS: Final = 64
WINDOW: Final = 4
HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, WIDE, NARROW = 32, 4, 2, 8, 40, 24

LAYER_FIELDS: Final = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
    *("encoder_layers", "num_encoder_layers", "depth", "num_blocks"),
)


# The tiny size, and the fields that take it.
_SIZES: Final = (
    (
        VOCABULARY,
        """
        encoder_hash_byte_group_vocab ngram_vocab_size_base vocab_size vocab_size_per_layer_input
        decoder_vocab_size unpadded_vocab_size
        """,
    ),
    (
        POSITIONS,
        """
        max_position_embeddings n_positions n_ctx max_target_positions max_seq_len context_length
        max_source_positions position_embedding_size num_position_embeddings
        """,
    ),
    (
        HIDDEN,
        """
        hidden_size d_model n_embd emb_dim embed_dim lru_width out_hidden_size text_hidden_size
        backbone_hidden_size adapter_in_dim adapter_out_dim adapter_input_size output_proj_dims
        word_embed_proj_dim mm_embed_dim
        """,
    ),
    (
        HEADS,
        """
        num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads
        attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads
        linear_num_value_heads linear_num_heads mamba_n_heads mamba_num_heads n_mamba_heads
        """,
    ),
    (
        KV_HEADS,
        """
        num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads
        num_global_key_value_heads
        """,
    ),
    (
        HEAD_SIZE,
        """
        head_dim swa_head_dim global_head_dim attention_head_dim kv_channels d_head dim_head linear_key_head_dim
        linear_value_head_dim linear_head_dim index_n_heads indexer_n_heads index_head_dim indexer_head_dim
        qk_nope_head_dim v_head_dim swa_v_head_dim query_pre_attn_scalar state_size ssm_state_size
        attention_head_size projection_dim index_block_size input_embedding_size output_embedding_size
        pronunciation_embed_dim shape_embed_dim pronunciation_vocab_size shape_vocab_size mamba_d_state
        hidden_size_per_layer_input d_rel rel_extent router_hidden_size laurel_rank
        """,
    ),
    (
        4,
        """
        qk_rope_head_dim rotary_dim gated_norm_rank num_experts num_local_experts n_routed_experts
        moe_num_experts zero_expert_num
        """,
    ),
    (
        16,
        """
        q_lora_rank kv_lora_rank o_lora_rank mamba_d_head mamba_head_dim embedding_size adapter_rank image_size
        """,
    ),
    (
        WIDE,
        """
        intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dff dim_ff mlp_dim
        feed_forward_size d_inner intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size
        """,
    ),
    (
        NARROW,
        """
        moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size
        shared_experts_intermediate_size moe_shared_expert_intermediate_size
        """,
    ),
    (
        2,
        """
        num_experts_per_tok top_k_experts moe_topk moe_top_k moe_k n_group hc_mult hc_count mamba_n_groups
        n_groups mamba_ngroups attn_layer_period expert_layer_period sliding_window_pattern
        global_attn_every_n_layers layer_group_size no_rope_layer_interval global_attention_interval
        """,
    ),
    (
        1,
        """
        topk_group first_k_dense_replace num_dense_layers max_window_layers attn_layer_offset
        expert_layer_offset
        """,
    ),
    (
        WINDOW,
        """
        sliding_window sliding_window_size attention_chunk_size window_size attention_window_size
        local_attention index_topk floor_scale log_scaling_n_floor chunk_size mamba_chunk_size block_size
        local_attn_chunk_length lsh_attn_chunk_length local_attention_window_len keep_window_size
        original_max_position_embeddings
        """,
    ),
    (
        8,
        """
        patch_size
        """,
    ),
)
SIZES: Final = {name: size for size, names in _SIZES for name in names.split()}

# Switches of a kind of layer that is off by default.
SWITCHES: Final[dict[str, Any]] = {"is_decoder": True, "use_sliding_window": True, "causal": True}

# Set also where the class leaves it to another field: keys are then shared by several queries.
EVEN_IF_UNSET: Final = ("num_key_value_heads", "head_dim")

# Where the default has as many of the first as of the second, so does the tiny one.
PAIRS: Final = (
    ("num_key_value_heads", "num_attention_heads"),
    ("swa_num_key_value_heads", "swa_num_attention_heads"),
    ("linear_num_key_heads", "linear_num_value_heads"),
)

NOTE_LAYERS: Final = {
    "swa_head_dim": 12,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
    "swa_kv_lora_rank": 16,
    "swa_q_lora_rank": 16,
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": HEADS,
    "sliding_window": WINDOW,
}
INDEXER: Final = {
    "indexer_n_heads": 8,  # of two heads, both would often be cut off at zero, and equal scores leave the choice open
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}

OWN: Final[dict[str, dict[str, Any]]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": NARROW, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_key_value_heads": HEADS, "num_experts_per_tok": 2},
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "n_input_layers": 1,
        "n_output_layers": 1,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"text_config": {**NOTE_LAYERS}},
    "dots3_note_text": {**NOTE_LAYERS},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4": {"text_config": {"global_head_dim": 16}},
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified": {"text_config": {"global_head_dim": 16}},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {"num_key_value_heads": HEADS, "head_dim": 4},
    "mamba2": {"head_dim": 16},
    "minimax": {"block_size": 14},  # more tokens than a capture has, as its own 256; requests have two and three
    "moshi": {"audio_encoder_config": {"codebook_size": 64}},
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    # Where a request comes to be longer, its `generate` goes on from the last token alone.
    "phi4_multimodal": {"original_max_position_embeddings": POSITIONS},
    "qwen4_exp": {"text_config": {**INDEXER}},
    "qwen4_exp_text": {**INDEXER},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": (8, 8),
        "axial_pos_embds_dim": (16, 16),
        "num_buckets": 2,
        "hash_seed": 0,
    },
    "rwkv": {"rescale_every": 1},  # as it has from its seventh layer on: a first call divides weights
    "sarvam_mla": {"num_key_value_heads": HEADS},
    "xlstm": {"hidden_size": 128, "ffn_round_up_to_multiple_of": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
}
