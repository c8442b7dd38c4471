"""Keys that trainers share, most of them Hugging Face's: fields that they become, trainings that aren't Lockstep's, and the rest."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from lockstep.plan.discovery.draft import Item
from lockstep.plan.translate import readers
from lockstep.plan.translate.readers import Refused, To, at_least, number, only_if_true, switch, whole, word

DEFAULT_PRECISION = "precision says the number format: BF16 by default"
DEEPSPEED = "zeroStage says how to cut the model, and deepspeed takes single settings"
STAGE3 = "zeroStage: Stage3 is the same cut, by DeepSpeed"
QUANTIZED = "model.quantization is NF4, or None"
_ASSISTANT = "data.trainOn is Assistant by default"
_REPORTS = "reportTo lists the trackers: TensorBoard by default"
_SCHEDULES = {
    "cosine": "Cosine", "cosine_with_min_lr": "Cosine", "none": "Cosine", "linear": "Linear", "constant": "Constant",
    "constant_with_warmup": "Constant",
}  # fmt: skip
_LONG = {"drop": "Drop", "delete": "Drop", "truncate": "Truncate", "right": "Truncate", "split": "Split", "raise": "Error"}
_WEEK = 604800
"""Longest time limit of a job, in seconds."""
DTYPE = word({"bfloat16": "BF16", "float16": "FP16", "float32": "FP32", "bf16": "BF16", "fp16": "FP16", "fp32": "FP32"}, DEFAULT_PRECISION)


_FIELDS: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    ("model.name", str, "name_or_path model_name_or_path base_model model_id_or_path"),
    ("data.path", str,
     "dataset_path train_file train_data_path train_data data_path train_path train_file_path train_dataset_path"
     " train_data_file training_file"),
    ("evaluation.data.path", str, "eval_file validation_file eval_data_path val_file eval_path eval_file_path validation_file_path"),
    ("model.revision", str, "model_revision revision_of_model"),
    ("model.quantization", only_if_true("NF4", "weights are not quantized by default"), "load_in_4bit use_4bit_quantization use_qlora"),
    ("model.quantization", word({"4": "NF4"}, QUANTIZED), "bits quantization_bit quant_bits"),
    ("data.name", str, "dataset_name"),
    ("data.config", str, "dataset_config_name dataset_config"),
    ("data.split", str, "dataset_split train_split dataset_train_split"),
    ("data.maxLength", at_least(8, "data.maxLength is at least 8 tokens, and 2048 by default"),
     "max_length sequence_len cutoff_len max_seq_length max_seq_len model_max_length block_size"),
    ("data.packing", switch, "packing sample_packing neat_packing"),
    ("data.overlong", word(_LONG, "data.overlong is Truncate, Drop, Split or Error"), "excess_length_strategy truncation_strategy"),
    ("data.trainOn", only_if_true("All", _ASSISTANT), "train_on_inputs train_on_prompt"),
    ("data.trainOn", only_if_true("LastTurn", _ASSISTANT), "mask_history"),
    ("data.trainOn", only_if_true("Assistant", "what is learned then is in data.trainOn"), "assistant_only_loss completion_only_loss"),
    ("optimization.epochs", readers.epochs, "num_train_epochs num_epochs max_epochs"),
    ("optimization.maxSteps", at_least(1, "not set: optimization.epochs counts"), "max_steps"),
    ("optimization.learningRate", number, "learning_rate"),
    ("optimization.warmupSteps", readers.warm_up, "warmup_steps warmup_ratio"),
    ("optimization.schedule", word(_SCHEDULES, "optimization.schedule is Cosine, Linear or Constant"), "lr_scheduler_type lr_scheduler"),
    ("optimization.minLearningRateRatio", readers.lowest_rate, "min_lr_rate cosine_min_lr_ratio"),
    ("optimization.weightDecay", number, "weight_decay"),
    ("optimization.maxGradientNorm", lambda value: number(max(float(number(value)), 0)),
     "max_grad_norm max_grad_normalization gradient_clip_val gradient_clipping"),
    ("optimization.beta1", number, "adam_beta1"),
    ("optimization.beta2", number, "adam_beta2"),
    ("optimization.epsilon", number, "adam_epsilon adam_eps"),
    ("optimization.recompute", readers.recomputed, "gradient_checkpointing"),
    ("optimization.recompute", lambda value: "None" if switch(value) else "Auto", "disable_gradient_checkpointing"),
    ("optimization.microBatchSize", whole, "per_device_train_batch_size micro_batch_size train_micro_batch_size"),
    ("optimization.globalBatchSize", whole, "global_batch_size"),
    ("optimization.offload", word({"cpu": "CPU", "nvme": "CPU", "true": "CPU", "none": "None", "false": "None"}, "CPU or None"),
     "offload_params fsdp_offload_params deepspeed_config.offload_optimizer_device zero_optimization.offload_optimizer.device"
     " zero_optimization.cpu_offload"),
    ("evaluation.data.split", str, "dataset_test_split"),
    ("evaluation.holdout", readers.held_out, "val_set_size val_size test_split_size split_dataset_ratio val_ratio test_size eval_ratio"),
    ("evaluation.holdout", lambda value: readers.held_out(float(number(value)) / 100), "validation_split_percentage"),
    ("evaluation.samples", whole, "eval_subset_size"),
    ("evaluation.everySteps", at_least(1, "evaluation.everySteps counts steps, not a part of all"), "eval_steps"),
    ("checkpoint.content", word({"lite": "Lite", "full": "Full"}, "checkpoint.content is Full or Lite"), "checkpoint_mode"),
    ("checkpoint.content", only_if_true("Lite", "checkpoint.content is Full by default: a resume goes on exactly"), "save_only_model"),
    ("checkpoint.everySteps", at_least(1, "checkpoint.everySteps counts steps, not a part of all"),
     "save_steps every_n_train_steps checkpointing_steps"),
    ("checkpoint.keep", at_least(2, "the newest two checkpoints always stay"), "save_total_limit"),
    ("checkpoint.resumeFrom", readers.resumed, "resume_from_checkpoint resume"),
    ("lora.rank", whole, "r lora_r lora_rank lora.rank"),
    ("lora.alpha", whole, "lora_alpha lora.alpha"),
    ("lora.dropout", number, "lora_dropout lora_dropout_p lora.dropout"),
    ("lora.targetModules", readers.names, "target_modules lora_target_modules lora_target"),
    ("lora.targetModules", only_if_true(readers.ALL_LINEAR, "lora.targetModules lists names of layers"), "lora_target_linear"),
    ("lora.targetParameters", readers.names, "target_parameters lora_target_parameters"),
    ("lora.modulesToSave", readers.names, "modules_to_save lora_modules_to_save additional_target"),
    ("lora.rankStabilized", switch, "use_rslora peft_use_rslora"),
    ("lora.dora", switch, "use_dora peft_use_dora"),
    ("lora.initFrom", lambda value: value[0] if isinstance(value, list) and value else value,
     "lora_model_dir adapter_name_or_path adapters"),
    ("precision", only_if_true("BF16", DEFAULT_PRECISION), "bf16 bfloat16 pure_bf16"),
    ("precision", only_if_true("FP16", DEFAULT_PRECISION), "fp16 float16"),
    ("seed", whole, "seed"),
    ("zeroStage", word({"0": "Stage1", "1": "Stage1", "2": "Stage2", "3": "Stage3"}, "zeroStage is Stage1, Stage2 or Stage3"),
     "zero_optimization.stage deepspeed_config.zero_stage"),
    ("hangTimeouts.collectiveSeconds", at_least(5, f"hangTimeouts.collectiveSeconds is from 5 to {_WEEK}, and 600 by default", _WEEK),
     "ddp_timeout"),
    ("reportTo", readers.trackers, "report_to"),
    ("reportTo", only_if_true([Item("WandB")], _REPORTS), "use_wandb"),
    ("reportTo", only_if_true([Item("MLflow")], _REPORTS), "use_mlflow"),
    ("reportTo", only_if_true([Item("TensorBoard")], _REPORTS), "use_tensorboard"),
    ("env", lambda value: [Item({"name": "WANDB_PROJECT", "value": str(value)})], "wandb_project"),
)  # fmt: skip
"""Field, reader of its value, and the keys that become it."""
FIELDS = {key: To(field, read) for field, read, keys in _FIELDS for key in keys.split()}
PICTURES = "training on pictures, video or sound"
PREFERENCES = "training on preferences (DPO and its kin)"
NO_TRAINING = "no training, but inference or an export"
OTHER_LOSS = "training with another loss than cross entropy"
OTHER_ADAPTER = "another kind of adapter"
MEGATRON = "training by Megatron, which cuts layers"
_METHOD_KEYS = "stage rl rlhf_type trl swift task method pref_loss"


def _methods(words: str) -> str:
    """Return words KEY=VALUE of names of methods, for all keys that name a method."""
    return " ".join(f"{key}={name}" for key in _METHOD_KEYS.split() for name in words.split())


OTHERS: Refused = (
    ("DPO, training on preferences", _methods("dpo ipo online_dpo")),
    ("KTO, training on preferences", _methods("kto kto_pair")),
    ("ORPO, SimPO or CPO, training on preferences", _methods("orpo simpo cpo")),
    ("PPO, reinforcement learning", _methods("ppo")),
    ("GRPO, reinforcement learning", _methods("grpo gdpo rloo")),
    ("training on preferences or rewards, or by a teacher", "swift=rlhf rlhf_type"),
    ("training of a reward model",
     _methods("rm reward reward_modeling") + " reward_model=true process_reward_model=true center_rewards_coefficient"),
    ("distillation from a teacher (GKD)", _methods("gkd") + " teacher_model teacher_model_name_or_path kd_trainer=true"),
    ("reinforcement learning from rewards of generated answers (GRPO, PPO, RLOO)",
     "reward_funcs num_generations reward_model reward_model_path sft_model_path kl_coef"),
    (PREFERENCES, "ref_model dpo use_dpo=true dpo_beta"),
    (NO_TRAINING, _methods("infer export deploy eval app sample rollout vllm-serve env skills")),
    ("training of a part of the weights at a time (LISA)", "use_lisa lisa_activated_layers lisa_n_layers"),
    ("training of a part of the weights",
     "finetuning_type=freeze unfrozen_parameters spectrum_top_fraction peft_layers_to_transform freeze_layers"
     " unfreeze_layers trainable_layers freeze_parameters freeze_parameters_ratio freeze_parameters_regex trainable_parameters"
     " trainable_parameters_regex"),
    ("training of single tokens, of added layers, or of one block of them after the other (BAdam)",
     "peft_trainable_token_indices use_llama_pro=true peft_layer_replication use_badam=true"),
    ("OFT, an adapter by rotations", "finetuning_type=oft"),
    (OTHER_ADAPTER, "use_adalora use_ia3 use_prompt_tuning peft.loftq_config.loftq_bits"),
    ("ReLoRA, which merges the adapter during the training", "relora relora_steps"),
    ("a schedule with restarts", "jagged_restart_steps"),
    ("training of a model that is quantized already", "gptq=true"),
    ("training for a quantization (QAT) or a sparse model", "qat use_onebitllms=true llmcompressor"),
    ("training of a diffusion model of text", "diffusion"),
    ("training of a model from scratch", "train_from_scratch=true reinit_weights=true"),
    ("a change of the model's attention or depth", "shift_attn=true s2_attention=true mixture_of_depths use_pose=true"),
    (OTHER_LOSS, "use_dft_loss=true use_asft_loss=true use_eaft_loss=true use_eaft=true enable_dft_loss=true"),
    ("training of a classifier", "num_labels task=classification task_type=seq_cls"),
    (MEGATRON,
     "use_mca use_megatron_bridge tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size"),
    ("training by a class of one's own or by a service", "trainer_cls hatchery"),
    (PICTURES,
     "processor_type image_size freeze_mm_modules=true image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps"
     " video_maxlen audio_sampling_rate use_audio_in_video crop_to_patches media_dir freeze_llm=true freeze_vit=false freeze_aligner=false"
     " max_pixels min_pixels fps_max_frames image_max_token_num video_max_token_num nframes vit_lr aligner_lr vit_gradient_checkpointing"
     " vision_tower image_folder mm_projector_lr vision_tower_lr tune_mm_mlp_adapter image_aspect_ratio"),
)  # fmt: skip
NO_SETTING = "the trainer has no such setting"
_LEFT_OUT = (
    ("optimization.globalBatchSize counts the one before it", "gradient_accumulation_steps"),
    ("optimization.minLearningRateRatio is min_lr / learning_rate", "min_lr"),
    ("all trained weights have optimization.learningRate", "loraplus_* lorap_* embedding_lr* lr_groups"),
    ("optimization.schedule has no further settings", "lr_scheduler_kwargs cosine_constant_lr_ratio lr_quadratic_warmup lr_div_factor"),
    ("the optimizer is torch's AdamW", "optim optim_* optimizer* use_galore galore_* use_apollo apollo_* use_muon use_adam_mini"),
    ("nothing like it is in the loss: the result may differ", "label_smoothing_factor neftune_noise_alpha *aux_loss_coef"),
    ("seed is that of the data, too, and decides their order", "data_seed full_determinism *shuffle*"),
    ("the adapter begins as PEFT's does by default: it changes nothing at the start", "pissa_* *init_lora_weights init_weights lora_ga_*"),
    ("lora.rank and lora.alpha count for all layers, and biases have no adapter", "*rank_pattern *alpha_pattern lora_bias"),
    ("method is LoRA by default; Full trains every weight",
     "finetuning_type adapter full_finetune use_lora use_peft use_peft_lora tuner_type train_type sft_type"),
    (QUANTIZED, "load_in_8bit quant_bit"),
    ("model.quantization: NF4 has its own settings: blocks of 64, computed in precision",
     "bnb_* use_bnb_nested_quant use_nested_quant quantization_method quant_method quantization_type double_quantization"),
    ("precision says the number format of weights, too", "torch_dtype dtype model_dtype *_full_eval half_precision_backend"),
    ("the chat template is the tokenizer's own; data.chatTemplate names a file with another one",
     "template template_* chat_template chat_template_* conversation_template prompt_template* agent_template"),
    ("data.chatTemplateKwargs sets variables of the template", "chat_template_kwargs enable_thinking"),
    ("a system message and calls of tools belong into the data", "system default_system* system_prompt tool_format"),
    ("columns are read by the names that docs/how-to/data.md lists: rename others", "*_column columns dataset_text_field *_field"),
    ("all samples of a split: train[:1000] takes a part of it", "max_samples train_dataset_sample"),
    ("data.sources are mixed, each sample weight times", "datasets mix_strategy interleave_probs"),
    ("data.trainOn says what is learned; answers are learned through their stop token",
     "stage roles_to_train train_on_eos train_on_eot eot_tokens message_field_training"),
    ("packing fills sequences as far as samples go; without it a step's samples are joined without padding",
     "pad_to_sequence_len *sample_packing* *multipack* eval_packing packing_* batch_flattening padding_free pad_to_multiple_of"),
    ("tokens are made once and kept on disk",
     "dataloader_* dataset_num_proc *preprocess* remove_unused_columns streaming overwrite_cache group_by_length tokenized_path"
     " lazy_tokenize load_from_cache_file dataset_prepared_path dataset_processes dataset_shard* dataset_dir"),
    ("the model's vocabulary stays as it is: add tokens to the model's folder first",
     "*special_tokens* tokens resize_* added_tokens* add_tokens eos_token pad_token"),
    ("the model's own folder has its configuration and its tokenizer",
     "tokenizer_* use_fast_tokenizer use_slow_tokenizer model_type model_config model_init_kwargs rope_* is_*_derived_model"
     " overrides_of_model_* output_router_logits device_map"),
    ("the trainer chooses its own kernels; the update is the same",
     "*attn_impl* attn_implementation flash_attn* *_attention use_flash_* *liger* use_unsloth* unsloth_* torch_compile* tf32 use_cache"
     " gradient_checkpointing_kwargs use_reentrant* ddp_* low_cpu_mem_usage lora_*_kernel cut_cross_entropy plugins"),
    ("zeroStage: Stage3 cuts the model over all ranks, and nothing cuts single layers or samples",
     "tensor_parallel_size pipeline_parallel_size context_parallel_size sequence_parallel_* expert_parallel_size"),
    (STAGE3, "fsdp fsdp_* dp_shard_size dp_replicate_size"),
    (DEEPSPEED, "deepspeed deepspeed_*"),
    ("optimization.offload moves the optimizer's state alone; recompute saves activations", "*_offloading lora_on_cpu"),
    ("Lockstep starts the ranks: their number follows from --nodes and --gpus-per-node, or from the cluster file",
     "local_rank world_size launcher nproc_per_node nnodes node_rank master_addr master_port cuda_visible_devices ray_* use_ray cluster"),
    ("every step is logged; it costs no collective of its own", "logging_s* logging_first_step log_level"),
    ("all files of the job are in runs/JOB of the workspace",
     "output_dir logging_dir overwrite_output_dir run_name save_safetensors cache_dir paths"),
    ("evaluation always takes a fixed subset; for all that is held out let evaluation.samples be larger than it", "eval_dataset_type"),
    ("evaluation.everySteps counts steps, and each evaluation takes a fixed subset with optimization.microBatchSize",
     "*eval_strategy evaluation_strategy evals_per_epoch do_eval per_device_eval_batch_size eval_batch_size"),
    ("evaluation.data.split names a split, evaluation.holdout a share", "val_split validation_split"),
    ("evaluation measures the loss, and generates no text", "predict_with_generate do_predict generation_* max_new_tokens do_*_eval"),
    ("checkpoint.everySteps counts steps, 100 by default", "save_strategy saves_per_epoch save_first_step auto_resume_from_checkpoints"),
    ("the best checkpoint is always kept, and nothing ends a training early",
     "load_best_model_at_end metric_for_best_model greater_is_better early_stop*"),
    ("the trainer runs no code that a model or a file brings", "trust_remote_code custom_* external_plugins callbacks"),
    ("nothing is uploaded; lockstep adapter get brings the adapter, lockstep cp the files", "push_to_hub* hub_* push_dataset_to_hub"),
    ("Lockstep asks the Hugging Face hub, always; a token goes into spec.env, from a Secret", "use_hf *_hub_token hf_use_auth_token"),
    ("a tracker's own variables go into spec.env", "wandb_* mlflow_* with_tracking"),
    ("a tracker that Lockstep doesn't have", "swanlab_* use_swanlab comet_* use_comet trackio_* use_trackio"),
    ("the towers that see or hear are never trained", "freeze_vision_tower freeze_multi_modal_projector freeze_vit freeze_aligner"),
    ("the name of the file is enough", "do_train task_type lora_task_type"),
)  # fmt: skip
"""Reason why keys become no field, and forms of these keys."""


def left_out(path: str) -> str:
    """Return why a key becomes no field: by its path, by its last part, by the section that it is in."""
    sections = path.lower().split(".")
    for name in (path, sections[-1], *sections[-2::-1]):
        for reason, forms in _LEFT_OUT:
            if any(fnmatchcase(name, form) for form in forms.split()):
                return reason
    return "a variable of the environment: spec.env takes it" if path.isupper() else NO_SETTING
