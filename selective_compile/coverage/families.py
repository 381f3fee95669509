"""Which family each registered model type belongs to, for the headings of the coverage page and its bars."""

from __future__ import annotations

from typing import Final

DENSE: Final = "dense decoders"
EXPERTS: Final = "mixtures of experts"
HYBRID: Final = "hybrids of attention and recurrent or convolutional layers"
RECURRENT: Final = "recurrent"
BERT_LIKE: Final = "BERT-like, as decoders"
HALVES: Final = "decoder halves of encoder-decoders"
WRAPPERS: Final = "multimodal wrappers, text alone"
ODD: Final = "others"
NEW: Final = "not known when this table was written"

FAMILIES: Final = (DENSE, EXPERTS, HYBRID, RECURRENT, BERT_LIKE, HALVES, WRAPPERS, ODD, NEW)

_MEMBERS: Final = {
    DENSE: """
        apertus apertus1p5_text arcee biogpt bitnet bloom codegen cohere cohere2 cohere_compass_text ctrl cwm
        diffllama doge dory emu3 ernie4_5 exaone exaone4 falcon flint gemma gemma2 gemma3_text gemma3n_text
        gemma4_text gemma4_unified_text glm glm4 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj
        granite granite_swa helium hunyuan_v1_dense hyperclovax internlm3 iquestcoder jais2 llama minicpm3 ministral
        ministral3 mistral modernbert-decoder mpt nanochat nemotron olmo olmo2 olmo3 openai-gpt opt persimmon phi
        phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2 vaultgemma xglm youtu
    """,
    EXPERTS: """
        afmoe aria_text axk1 axk2 beam cohere2_moe dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots1
        dots3_note dots3_note_text ernie4_5_moe exaone_moe flex_olmo glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss
        granitemoe granitemoe_swa granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 jetmoe kolibri1 laguna llama4
        llama4_text longcat_flash mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text mixtral olmoe phimoe qwen2_moe
        qwen3_moe sarvam_mla sarvam_moe solar_open
    """,
    HYBRID: """
        bailing_hybrid bamba falcon_h1 granitemoehybrid inkling2_loop_text inkling2_text inkling_text jamba
        kimi_linear lara_mini lfm2 lfm2_moe lfm3 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text
        qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma zamba zamba2 zaya
    """,
    RECURRENT: "falcon_mamba mamba mamba2 rwkv xlstm",
    BERT_LIKE: """
        bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
        roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod
    """,
    HALVES: """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody mvp pegasus plbart
        prophetnet trocr whisper
    """,
    WRAPPERS: """
        gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant got_ocr2
        moss_transcribe_diarize phi4_multimodal
    """,
    ODD: "blt cpmant fuyu git hrm_text mllama moshi reformer xlm xlnet",
}
# What every test run tries: each way of attending, numbering and mixing, in types that are quick to trace.
CORE: Final = tuple(
    """
    bart bert bloom cohere2 deepseek_v3 falcon gemma2 gemma3 gemma3_text gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj
    jamba lfm2 llama llama4_text mamba mistral mixtral mpt opt phi3 qwen2 qwen3_moe recurrent_gemma roberta xlnet
    """.split()
)

_FAMILY_OF: Final = {name: family for family, names in _MEMBERS.items() for name in names.split()}


def family_of(model_type: str) -> str:
    """One of `FAMILIES`; `NEW` for a type of a later release of transformers."""
    return _FAMILY_OF.get(model_type, NEW)
