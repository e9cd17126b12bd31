"""The keys of DeepSpeed's JSON that the account does not read, and why; those that it cannot do without are refused.

[deepspeed: runtime/config.py, runtime/zero/config.py, runtime/zero/offload_config.py, runtime/precision_config.py]
"""

from __future__ import annotations

SPEED = "changes the time of a step, not what is held"
NUMBERS = "changes numbers, not what is held"
LOGS = "is of logs and measurements"
LOADING = "is of checkpoints and loading"
ALLOWED = "allows or forces an implementation; the account is of the optimizer itself"

IDLE: dict[str, str] = {
    "zero_optimization.allgather_partitions": SPEED,
    "zero_optimization.allgather_bucket_size": "is not counted: gathered weights are the parameters themselves",
    "zero_optimization.reduce_scatter": SPEED,
    "zero_optimization.use_multi_rank_bucket_allreduce": SPEED,
    "zero_optimization.contiguous_gradients": "is taken as true",
    "zero_optimization.ignore_unused_parameters": NUMBERS,
    "zero_optimization.round_robin_gradients": SPEED,
    "zero_optimization.legacy_stage1": "is taken as false",
    "zero_optimization.elastic_checkpoint": LOADING,
    "zero_optimization.load_from_fp32_weights": LOADING,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": LOADING,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": LOADING,
    "zero_optimization.pipeline_loading_checkpoint": LOADING,
    "zero_optimization.memory_efficient_linear": "is taken as true",
    "zero_optimization.override_module_apply": LOADING,
    "zero_optimization.log_trace_cache_warnings": LOGS,
    "zero_optimization.enable_sanity_checks": LOGS,
    "zero_optimization.stage3_module_granularity_threshold": SPEED,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": SPEED,
    "zero_optimization.stage3_allgather_sequential": "is taken as false",
    "zero_optimization.stage3_partition_stream_chunk_size": LOADING,
    "zero_optimization.stage3_model_persistence_threshold": "is taken as unlimited",
    "zero_optimization.cpu_offload_use_pin_memory": "pinned memory is counted as the engine rounds it",
    "zero_optimization.zero_quantized_weights": "is of what is sent, which is counted unquantised",
    "zero_optimization.zero_quantized_gradients": "is of what is sent, which is counted unquantised",
    "gradient_clipping": NUMBERS,
    "prescale_gradients": NUMBERS,
    "gradient_predivide_factor": NUMBERS,
    "steps_per_print": LOGS,
    "wall_clock_breakdown": LOGS,
    "memory_breakdown": LOGS,
    "dump_state": LOGS,
    "log_level": LOGS,
    "disable_allgather": SPEED,
    "dataloader_drop_last": NUMBERS,
    "zero_allow_untested_optimizer": ALLOWED,
    "zero_force_ds_cpu_optimizer": ALLOWED,
    "seq_parallel_communication_data_type": "is of what is sent",
    "use_data_before_expert_parallelism": SPEED,
    "vocabulary_size": NUMBERS,
    "managed_gradient_accumulation": NUMBERS,
    "fp16.auto_cast": NUMBERS,
    "fp16.loss_scale_window": NUMBERS,
    "fp16.hysteresis": NUMBERS,
    "fp16.consecutive_hysteresis": NUMBERS,
    "fp16.min_loss_scale": NUMBERS,
    "bf16.immediate_grad_update": "is taken as false",
    "bf16.check_grad_overflow": NUMBERS,
}
"""Keys without a bearing on what the account counts."""

IDLE_TABLES: dict[str, str] = {
    "scheduler": "is of the learning rate over time",
    "tensorboard": LOGS,
    "wandb": LOGS,
    "comet": LOGS,
    "csv_monitor": LOGS,
    "monitor_config": LOGS,
    "comms_logger": LOGS,
    "comms_config": LOGS,
    "flops_profiler": LOGS,
    "timers": LOGS,
    "autotuning": "is of the tuner, which makes settings of its own",
    "aio": SPEED,
    "checkpoint": LOADING,
    "nebula": LOADING,
    "datastates_ckpt": LOADING,
    "curriculum_learning": "is of the data",
    "data_efficiency": "is of the data",
    "hybrid_engine": "is of generation, not of training",
    "weight_quantization": "is of inference",
    "eigenvalue": NUMBERS,
    "optimizer.params": NUMBERS,
    "zero_optimization.zeropp_loco_param": NUMBERS,
    "zero_optimization.leaf_module": "leaf modules are counted as the model's blocks",
    "activation_checkpointing": "acts where the model calls DeepSpeed's checkpointing; --recompute says what is",
    "compile": "--compile says it, where the engine's account has it",
    "pipeline": "layers are spread evenly over stages; --pp-layout says otherwise",
}
"""The same of whole tables."""

UNCOUNTED: dict[str, str] = {
    "zero_optimization.offload_optimizer.super_offload": "SuperOffload",
    "bf16.bf16_master_weights_and_grads": "master weights and gradients in bf16",
    "bf16.bf16_optimizer_states": "moments in bf16",
    "fp16.fp16_master_weights_and_grads": "master weights and gradients in fp16",
    "zero_optimization.zero_quantized_nontrainable_weights": "frozen weights that are kept quantised",
    "amp.enabled": "Apex's mixed precision",
    "torch_autocast.enabled": "autocast in place of 16-bit weights",
    "elasticity.enabled": "batches that elasticity chooses",
    "quantize_training.enabled": "quantised training",
    "progressive_layer_drop.enabled": "layers that are dropped",
    "compression_training.enabled": "compression",
    "expert_parallel.enabled": "experts that DeepSpeed itself spreads over ranks",
}
"""Switches that change what is held, and that no account here counts: refused where they are on."""

UNCOUNTED_TABLES: dict[str, str] = {
    "zero_optimization.zenflow": "ZenFlow's offloading of a part",
    "sparse_attention": "attention of DeepSpeed's own kernels",
}
"""The same of tables that are there at all."""

OFFLOAD = (
    "device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory", "pipeline_read",
    "pipeline_write", "fast_init", "ratio", "super_offload", "convert_grad_on_cpu", "cpuadam_cores_perc",
)  # fmt: skip
"""Keys of both offload tables."""

READ = (
    "zero_optimization.overlap_comm",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_optimization.stage",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
    "zero_optimization.cpu_offload",
    "zero_optimization.cpu_offload_param",
    "bf16.enabled",
    "bfloat16.enabled",
    "fp16.enabled",
    "fp16.loss_scale",
    "fp16.initial_scale_power",
    "optimizer.type",
    "optimizer.params.lr",
    "data_types.grad_accum_dtype",
    "communication_data_type",
    "gradient_allreduce_op",
    "tensor_parallel.autotp_size",
    "sequence_parallel_size",
    "pipeline.stages",
)
"""Keys that make the plan, or that a rule asks."""

MEASURED = {
    "zero_optimization.stage3_max_live_parameters": 1_000_000_000,
    "zero_optimization.stage3_max_reuse_distance": 1_000_000_000,
    "zero_optimization.stage3_prefetch_bucket_size": 50_000_000,
    "zero_optimization.stage3_param_persistence_threshold": 100_000,
    "zero_optimization.sub_group_size": 1_000_000_000,
}
"""Sizes that the account takes at DeepSpeed's own default."""

OTHERS = (
    "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.mics_shard_size",
    "zero_optimization.mics_hierarchical_params_gather",
    "sparse_gradients",
    *(f"zero_optimization.offload_{what}.{key}" for what in ("optimizer", "param") for key in OFFLOAD),
)
"""Keys that are answered one by one."""

KNOWN = frozenset((*READ, *IDLE, *UNCOUNTED, *MEASURED, *OTHERS))
TABLES = (*IDLE_TABLES, *sorted({key.rpartition(".")[0] for key in KNOWN if "." in key}))
"""Tables that DeepSpeed has."""
