"""Arguments of transformers' Trainer and programs around it, by what they say, and those that no account counts.

[transformers: training_args.py; LLaMA-Factory: hparams; axolotl: utils/schemas; trl: trainer/sft_config.py]
"""

from __future__ import annotations

from trainledger.adapters.swift import SIGNS

MODEL = ("model_name_or_path", "base_model", "model", "model_id", "model_id_or_path")
MBS = ("per_device_train_batch_size", "micro_batch_size")
OWN_MBS = 8
"""What transformers takes where nothing says it. [transformers: training_args.py, per_device_train_batch_size]"""
SEQ = ("cutoff_len", "model_max_length", "max_seq_length", "max_seq_len", "sequence_len", "max_length", "block_size")
RANK = ("lora_rank", "lora_r")
TARGETS = ("lora_target", "lora_target_modules", "lora_targets", "target_modules")
ATTENTION = ("flash_attn", "attn_implementation", "flash_attention", "attn_impl", "use_flash_attn")
OPTIMIZERS = {
    "adamw_hf": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw-fused",
    "adamw_apex_fused": "adamw-fused",
    "adamw_bnb_8bit": "adamw-8bit",
    "adamw_8bit": "adamw-8bit",
    "adamw_torch_8bit": "adamw-8bit",
    "paged_adamw_8bit": "adamw-8bit",
    "paged_adamw_32bit": "adamw",
    "paged_adamw": "adamw",
}
_LOSS = "makes no logits in its fused loss, which the account holds: what it says is an upper bound"
_HOST = "keeps checkpoints in host memory, which --offload activations counts where the engine has it"
NOT_COUNTED: dict[str, str] = {
    **dict.fromkeys(
        (
            "enable_liger_kernel",
            "use_liger_kernel",
            "use_liger",
            "liger_fused_linear_cross_entropy",
            "cut_cross_entropy",
        ),
        _LOSS,
    ),
    **dict.fromkeys(("activation_offloading", "offload_activations", "use_unsloth_gc", "use_unsloth"), _HOST),
    **dict.fromkeys(
        ("packing", "sample_packing", "neat_packing"), "fills sequences up, which the account takes as full"
    ),
    "use_vllm": "keeps weights and a cache of its own on a card, which are not counted: a lower bound",
    "torch_compile": "is said by --compile, where the engine's account has it",
    **dict.fromkeys(
        ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "tiled_mlp"),
        "keeps less than the layers that the account has: what it says is an upper bound",
    ),
    "use_cache": "is off while activations are computed again",
}
"""Arguments that change what is held and are no flag here, and what to make of them."""
REFUSED: dict[str, str] = {
    **dict.fromkeys(("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon"), "the optimizer's state"),
    **dict.fromkeys(("lora_modules_to_save", "modules_to_save", "additional_target"), "what is trained whole"),
    **dict.fromkeys(("unfrozen_parameters", "use_llama_pro"), "which weights are trained"),
    **dict.fromkeys(("mixture_of_depths", "qat", "relora"), "the model that is trained"),
}
"""Arguments that change what is held, and that neither the account nor a flag has."""
FACTORY = ("finetuning_type", "stage", "template", "cutoff_len")
"""Arguments of LLaMA-Factory, which recomputes unless it is told not to."""
DEGREES = {
    "tensor_parallel_size": "tp",
    "context_parallel_size": "cp",
    "sequence_parallel_size": "cp",
    "sequence_parallel_degree": "cp",
    "expert_parallel_size": "ep",
    "dp_replicate_size": "dp_replicate",
    "dp_shard_size": "dp_shard",
}
KINDS = ("finetuning_type", "adapter", *SIGNS)
"""Arguments that say what is trained, and the values that are counted."""
COUNTED = ("full", "lora", "qlora", "dora")
BITS = ("quantization_bit", "quant_bits")
STAGES = ("stage", "rl", "rlhf_type")
ROLLOUTS = ("ppo", "grpo", "kto", "rloo", "gkd", "gdpo")
"""Losses of several models, or of answers that are made in the run."""
TRUE = ("true", "1", "yes", "auto")
