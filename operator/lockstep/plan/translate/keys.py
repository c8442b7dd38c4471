"""Keys that trainers share, most of them Hugging Face's: fields that they become, trainings that aren't Lockstep's, and the rest."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from lockstep.plan.discovery.draft import Item
from lockstep.plan.translate import readers
from lockstep.plan.translate.readers import DIFFERS, Refused, To, at_least, is_on, number, only_if_true, switch, whole, word

DEFAULT_PRECISION = "precision says the number format: BF16 by default"
DEEPSPEED = "zeroStage says how to cut the model, and deepspeed takes single settings"
STAGE3 = "zeroStage: Stage3 is the same cut, by DeepSpeed"
QUANTIZED = "model.quantization is NF4, or None"
_ASSISTANT = "data.trainOn is Assistant by default"
_REPORTS = "reportTo lists the trackers: TensorBoard by default"
_LONG = {"drop": "Drop", "delete": "Drop", "truncate": "Truncate", "right": "Truncate", "split": "Split", "raise": "Error"}
ACCUMULATIONS = "gradient_accumulation_steps grad_accum_steps grad_accumulation_steps accumulation_steps grad_accum gradient_accumulation"
"""Keys of the micro-batches of a step."""
TOKENIZERS = "tokenizer tokenizer_name tokenizer_name_or_path tokenizer_path tokenizer_config tokenizer_id"
"""Keys that name a tokenizer, which may be the model's."""
_WEEK = 604800
"""Longest time limit of a job, in seconds."""
DTYPE = word({"bfloat16": "BF16", "float16": "FP16", "float32": "FP32", "bf16": "BF16", "fp16": "FP16", "fp32": "FP32"}, DEFAULT_PRECISION)


_FIELDS: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    ("model.name", readers.one, "name_or_path model_name_or_path base_model model_id_or_path model_path model_name model_id"
     " pretrained_model pretrain base_model_name base_model_path pretrained_model_name_or_path base_model_name_or_path"
     " pretrained_model_path base_model_id"),
    ("data.path", readers.one, "dataset_path train_file train_data_path train_data data_path train_path train_file_path"
     " train_dataset_path train_data_file train_file_dir dataset_path_name training_file train.path train_data.path train_dataset.path"
     " dataset.path data.path train_dataset training_data data_file dataset_file train_jsonl data.train training_data_path"),
    ("evaluation.data.path", readers.one, "eval_file val.path val_data.path eval.path eval_data.path validation.path eval_dataset.path"
     " validation_dataset.path validation_file eval_data_path val_file eval_path eval_file_path validation_file_path validation_dataset"
     " eval_dataset val_dataset valid_file validation_file_dir valid_path valid_data dev_file eval_dataset_path val_dataset_path"
     " validation_path val_path val_data_path val_data eval_data data.val data.eval data.validation"),
    ("model.revision", str, "model_revision revision_of_model"),
    ("model.quantization", only_if_true("NF4", "weights are not quantized by default"), "load_in_4bit use_4bit_quantization use_qlora"),
    ("model.quantization", word({"4": "NF4", "16": "None", "32": "None"}, DIFFERS + QUANTIZED), "bits quantization_bit quant_bits"),
    ("data.name", readers.one, "dataset_name dataset.name data.name"),
    ("data.config", str, "dataset_config_name dataset_config"),
    ("data.columns.text", str, "dataset_text_field text_key text_column text_field"),
    ("data.columns.messages", str, "messages_column messages_field messages_key conversation_column conversation_field"),
    ("data.columns.instruction", str, "prompt_column question_column instruction_column prompt_field question_field instruction_field"
     " prompt_key question_key"),
    ("data.columns.output", str, "response_column answer_column output_column completion_column target_column summary_column"
     " response_field answer_field output_field completion_field response_key answer_key"),
    ("data.columns.system", str, "system_column system_field"),
    ("data.split", str, "dataset_split train_split dataset_train_split"),
    ("data.maxLength", at_least(8, "data.maxLength is at least 8 tokens, and 2048 by default"), "max_length sequence_len cutoff_len"
     " max_seq_length max_seq_len model_max_length block_size max_len max_sequence_length seq_length"),
    ("data.packing", switch, "packing sample_packing neat_packing"),
    ("data.overlong", word(_LONG, "data.overlong is Truncate, Drop, Split or Error"), "excess_length_strategy truncation_strategy"),
    ("data.trainOn", only_if_true("All", _ASSISTANT), "train_on_inputs train_on_prompt"),
    ("data.trainOn", only_if_true("LastTurn", _ASSISTANT), "mask_history"),
    ("data.trainOn", only_if_true("Assistant", "what is learned then is in data.trainOn"), "assistant_only_loss completion_only_loss"),
    ("optimization.epochs", readers.epochs, "num_train_epochs num_epochs max_epochs epochs"),
    ("", readers.optimizer, "optim optimizer optimizer.type optimizer.name"),
    ("optimization.maxSteps", at_least(1, "not set: optimization.epochs counts"), "max_steps max_train_steps"),
    ("optimization.learningRate", number, "learning_rate lr"),
    ("optimization.warmupSteps", readers.warm_up, "warmup_steps warmup_ratio num_warmup_steps lr_warmup_ratio"),
    ("optimization.schedule", readers.schedule, "lr_scheduler_type lr_scheduler scheduler scheduler_type scheduler.type scheduler.name"
     " lr_scheduler.name lr_scheduler.type lr_schedule"),
    ("optimization.minLearningRateRatio", readers.lowest_rate, "min_lr_rate cosine_min_lr_ratio"),
    ("optimization.weightDecay", number, "weight_decay"),
    ("optimization.maxGradientNorm", lambda value: number(max(float(number(value)), 0)), "max_grad_norm max_grad_normalization"
     " gradient_clip_val grad_clip clip_grad_norm gradient_clip max_gradient_norm gradient_clipping"),
    ("optimization.beta1", number, "adam_beta1"),
    ("optimization.beta2", number, "adam_beta2"),
    ("optimization.epsilon", number, "adam_epsilon adam_eps optimizer.eps optim_args.eps params.eps"),
    ("optimization.recompute", readers.recomputed, "gradient_checkpointing"),
    ("optimization.recompute", lambda value: "None" if switch(value) else "Auto", "disable_gradient_checkpointing"),
    ("optimization.microBatchSize", whole, "per_device_train_batch_size per_device_batch_size batch_size_per_gpu batch_size_per_device"
     " per_gpu_train_batch_size micro_batch train_micro_batch_size_per_gpu micro_batch_size train_micro_batch_size"),
    ("optimization.globalBatchSize", whole, "global_batch_size"),
    ("optimization.offload", word({"cpu": "CPU", "nvme": "CPU", "true": "CPU", "none": "None", "false": "None"}, "CPU or None"),
     "offload_params fsdp_offload_params deepspeed_config.offload_optimizer_device zero_optimization.offload_optimizer.device"
     " zero_optimization.cpu_offload"),
    ("evaluation.data.split", str, "dataset_test_split"),
    ("evaluation.holdout", readers.held_out, "val_set_size val_size test_split_size split_dataset_ratio val_ratio test_size eval_ratio"
     " eval_split_ratio val_split_ratio validation_ratio"),
    ("evaluation.holdout", readers.split_or_share, "val_split validation_split eval_split test_split"),
    ("evaluation.holdout", lambda value: readers.held_out(float(number(value)) / 100), "validation_split_percentage"),
    ("evaluation.samples", whole, "eval_subset_size"),
    ("evaluation.everySteps", at_least(1, "evaluation.everySteps counts steps, not a part of all"), "eval_steps eval_interval eval_every"),
    ("checkpoint.content", word({"lite": "Lite", "full": "Full"}, "checkpoint.content is Full or Lite"), "checkpoint_mode"),
    ("checkpoint.content", only_if_true("Lite", "checkpoint.content is Full by default: a resume goes on exactly"), "save_only_model"),
    ("checkpoint.everySteps", at_least(1, "checkpoint.everySteps counts steps, not a part of all"), "save_steps every_n_train_steps"
     " checkpointing_steps save_interval save_every"),
    ("checkpoint.keep", at_least(2, "the newest two checkpoints always stay"), "save_total_limit"),
    ("checkpoint.resumeFrom", readers.resumed, "resume_from_checkpoint resume"),
    ("lora.rank", whole, "r lora_r lora_rank lora.rank peft.rank lora_config.rank peft_config.rank adapter.rank peft_lora_r"),
    ("lora.alpha", whole, "lora_alpha lora.alpha peft.alpha lora_config.alpha peft_config.alpha adapter.alpha peft_lora_alpha"),
    ("lora.dropout", number, "lora_dropout lora_dropout_p lora.dropout peft.dropout lora_config.dropout peft_config.dropout"
     " adapter.dropout"),
    ("lora.targetModules", readers.names, "target_modules lora_target_modules lora_target target_regex"),
    ("lora.targetModules", only_if_true(readers.ALL_LINEAR, "lora.targetModules lists names of layers"), "lora_target_linear"),
    ("lora.targetParameters", readers.names, "target_parameters lora_target_parameters"),
    ("lora.modulesToSave", readers.names, "modules_to_save lora_modules_to_save additional_target"),
    ("lora.rankStabilized", switch, "use_rslora peft_use_rslora"),
    ("lora.dora", switch, "use_dora peft_use_dora"),
    ("lora.initFrom", lambda value: value[0] if isinstance(value, list) and value else value, "lora_model_dir adapter_name_or_path"
     " adapters"),
    ("precision", only_if_true("BF16", DEFAULT_PRECISION), "bf16 bfloat16 pure_bf16"),
    ("precision", only_if_true("FP32", DEFAULT_PRECISION), "float32"),
    ("precision", only_if_true("FP16", DEFAULT_PRECISION), "fp16 float16"),
    ("precision", word({"true": "FP16"}, DEFAULT_PRECISION), "fp16.enabled"),
    ("precision", word({"true": "BF16"}, DEFAULT_PRECISION), "bf16.enabled"),
    ("seed", whole, "seed random_seed train_seed training_seed"),
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
_METHOD_KEYS = "stage rl rlhf_type trl swift task method pref_loss launcher"


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
    ("reinforcement learning from rewards of generated answers (GRPO, PPO, RLOO)", "reward_funcs num_generations nemo_gym_enabled=true"
     " reward_model reward_model_path sft_model_path kl_coef"),
    (PREFERENCES, "ref_model dpo use_dpo=true dpo_beta"),
    (NO_TRAINING, _methods("infer export deploy eval app sample rollout vllm-serve env skills predict generate merge judge test")),
    ("training of a part of the weights at a time (LISA)", "use_lisa lisa_activated_layers lisa_n_layers"),
    ("training of a part of the weights", "finetuning_type=freeze unfrozen_parameters spectrum_top_fraction peft_layers_to_transform"
     " freeze_layers unfreeze_layers trainable_layers freeze_parameters freeze_parameters_ratio freeze_parameters_regex"
     " trainable_parameters trainable_parameters_regex"),
    ("training of single tokens, of added layers, or of one block of them after the other (BAdam)", "peft_trainable_token_indices"
     " use_llama_pro=true peft_layer_replication use_badam=true"),
    ("OFT, an adapter by rotations", "finetuning_type=oft"),
    (OTHER_ADAPTER, "use_adalora use_ia3 use_prompt_tuning peft.loftq_config.loftq_bits use_mora=true mora"),
    ("ReLoRA, which merges the adapter during the training", "relora relora_steps"),
    ("a schedule with restarts", "jagged_restart_steps"),
    ("training of a model that is quantized already", "gptq=true"),
    ("training for a quantization (QAT) or a sparse model", "qat use_onebitllms=true llmcompressor"),
    ("training of a diffusion model of text", "diffusion"),
    ("training of a model from scratch", "train_from_scratch=true reinit_weights=true"),
    ("a change of the model's attention or depth", "shift_attn=true s2_attention=true mixture_of_depths use_pose=true"
     " scaling_softmax=true"),
    (OTHER_LOSS, "use_dft_loss=true use_asft_loss=true use_eaft_loss=true use_eaft=true enable_dft_loss=true"),
    ("training of a classifier", "num_labels task=classification task_type=seq_cls trl=classification trl=classifier trl=glue"),
    ("training of a model of embeddings", "trl=embedding trl=embeddings trl=reranker trl=rerank"),
    (MEGATRON, "use_mca use_megatron_bridge megatron_bridge_args use_hyper_parallel tensor_model_parallel_size"
     " pipeline_model_parallel_size expert_model_parallel_size"),
    ("training by a class of one's own or by a service", "trainer_cls hatchery"),
    (PICTURES, "processor_type image_size freeze_mm_modules=true image_max_pixels image_min_pixels video_max_pixels video_min_pixels"
     " video_fps video_maxlen audio_sampling_rate use_audio_in_video crop_to_patches media_dir freeze_llm=true freeze_vit=false"
     " freeze_aligner=false max_pixels min_pixels fps_max_frames image_max_token_num video_max_token_num nframes vit_lr aligner_lr"
     " vit_gradient_checkpointing freeze_language_model=true norm_bbox image_do_pan_and_scan=true max_images vision_tower image_folder"
     " mm_projector_lr vision_tower_lr tune_mm_mlp_adapter image_aspect_ratio"),
)  # fmt: skip
NO_SETTING = "the trainer has no such setting"
ELSEWHERE = ("it counts for another adapter, or for a part of the weights, alone", "it counts in trainings on preferences or rewards alone")
"""Reasons of keys that count where a tool's own key names such a training; a script of one's own may have no such key."""
_DIFFER = (
    ("all trained weights have optimization.learningRate", "loraplus_* lorap_* lora_lr_ratio embedding_lr* lr_groups"),
    ("optimization.schedule has no further settings", "lr_scheduler_kwargs cosine_constant_lr_ratio lr_quadratic_warmup lr_div_factor"
     " num_cycles lr_scheduler_num_cycles"),
    ("model.quantization is NF4, or None", "load_in_8bit=true *quant_type=fp4 quantization_type=fp4"),
    ("the optimizer is torch's AdamW", "betas optimizer.* optimizer_* optim_args* use_galore use_apollo use_muon use_adam_mini"
     " use_adammini adam_beta3 adam_epsilon2 dion_* grokfast_* optim_target_modules"),
    ("nothing like it is in the loss", "label_smoothing label_smoothing_factor neftune_* noisy_embedding_alpha *aux_loss_coef"
     " ignore_pad_token_for_loss=false dense_mixer pose_*"),
    ("the order of samples follows from seed", "group_by_length=true disable_shuffling *dataloader_shuffle=false *shuffle=false"
     " shuffle_*=false curriculum_sampling train_sampling_strategy sortish_sampler"),
    ("the adapter begins as PEFT's does by default: it changes nothing at the start", "pissa_init *init_lora_weights init_weights"
     " lora_ga_* loftq_*"),
    ("lora.rank and lora.alpha count for all layers, and biases have no adapter", "*rank_pattern *alpha_pattern lora_bias bias"),
    ("lora.initFrom goes on with that adapter", "create_new_adapter"),
    ("the chat template is the tokenizer's own; data.chatTemplate names a file with another one", "template template_type chat_template"
     " chat_template_* conversation_template template_name conv_template prompt_template* prompt_format agent_template"
     " use_chat_template=false"),
    ("a system message and calls of tools belong into the data", "system default_system* system_prompt system_message tool_format"
     " response_prefix input_format no_input_format system_format"),
    ("rows are taken as they are: change the data itself", "shards_idx self_cognition_sample *deduplication min_sample_len"
     " drop_system_message input_transform message_property_mappings.* message_field_* role_tag content_tag datasets.roles* roles.*"),
    ("data.sources are mixed, each sample weight times", "datasets mix_strategy interleave_prob* stopping_strategy fraction"),
    ("all samples of a split: train[:1000] takes a part of it", "max_samples max_train_samples train_dataset_sample num_samples"),
    ("columns are read by the names that docs/how-to/data.md lists: data.columns maps others", "*_column columns *_field field_*"),
    ("data.chatTemplateKwargs sets variables of the template", "chat_template_kwargs* enable_thinking preserve_thinking *_thinking*"
     " *_think"),
    ("the tokenizer is the model's own", TOKENIZERS),
    ("data.trainOn says what is learned; answers are learned through their stop token", "roles_to_train train_on_eos train_on_eot"
     " eot_tokens message_field_training*"),
    ("the model's vocabulary stays as it is: add tokens to the model's folder first", "tokens resize_* added_tokens* add_tokens"
     " *new_special_tokens* *add_special_tokens *additional_special_tokens *eos_token"),
    ("the model's own folder has its configuration", "rope_scaling* rope_theta* overrides_of_model_* model_config"),
    ("texts lose their end where they are too long (data.overlong)", "truncation_mode=keep_end truncation_side=left"),
    ("optimization.globalBatchSize counts the samples of a step, microBatchSize those of a rank: the name doesn't tell which",
     "batch_size train_batch_size"),
    ("rows are read by their keys, and rendered by the chat template", "skip_prepare_dataset load_args disable_auto_column_mapping"
     " data_dir"),
    ("nothing ends a training early", "early_stop* loss_watchdog_*"),
    ("optimization.globalBatchSize is stated", "auto_find_batch_size"),
    ("precision is BF16, FP16 or FP32", "fp8 fp8_*"),
    ("the trainer runs no code that a model or a file brings", "custom_* external_plugins callbacks"),
)  # fmt: skip
_LEFT_OUT = (
    ("optimization.globalBatchSize counts the one before it", ACCUMULATIONS),
    ("optimization.minLearningRateRatio is min_lr / learning_rate", "min_lr"),
    ("the optimizer is torch's AdamW", "optim_* optimizer* torchdistx_path galore_* apollo_* qgalore_* muon_*"),
    ("seed is that of the data, too, and decides their order", "data_seed full_determinism *shuffle*"),
    ("the adapter begins as PEFT's does by default: it changes nothing at the start", "pissa_* init_lora_weights=true init_weights=true"),
    (ELSEWHERE[0], "oft_* fourier_* boft_* vera_* adalora_* llamapro_* reft_* adapter_act adapter_length module_dropout badam_*"
     " freeze_trainable_* freeze_extra_modules lisa_* mora_type num_layer_trainable name_module_trainable relora_* spectrum_*"
     " peft_layers_pattern gptq lora_fan_in_fan_out eaft_* asft_* jagged_* scaling_softmax_* noise_schedule"),
    (ELSEWHERE[1], "dpo_* kto_* simpo_* orpo_* cpo_* pref_* ppo_* rl_beta ref_model_* reward_* teacher_* kd_* rpo_* desirable_weight"
     " undesirable_weight max_prompt_len max_completion_length ref_adapters beta ld_alpha loss_weights precompute_* vllm trl ebft grpo_*"),
    ("method is LoRA by default; Full trains every weight", "method tuning_method finetuning_type adapter full_finetune use_lora"
     " use_peft use_peft_lora tuner_type train_type sft_type"),
    (QUANTIZED, "load_in_8bit quant_bit quantization quantize_* model_quantization_*"),
    ("model.quantization: NF4 has its own settings: blocks of 64, computed in precision", "peft_ensure_weight_tying bnb_*"
     " use_bnb_nested_quant use_nested_quant quantization_method quant_method quantization_type double_quantization"
     " quantization_device_map hqq_axis"),
    ("precision says the number format of weights, too", "torch_dtype dtype model_dtype *_full_eval half_precision_backend compute_dtype"
     " lora_dtype upcast_* fp32_* *_skip_upcast peft_autocast_adapter_dtype mixed_precision"),
    ("the chat template is the tokenizer's own", "template_backend chat_template=tokenizer_default chat_template=auto"
     " chat_template=default prompt_template=default"),
    ("a system message and calls of tools belong into the data", "tools_prompt add_version"),
    ("columns are read by the names that docs/how-to/data.md lists: data.columns maps others", "*_key"),
    ("data.sources are mixed, each sample weight times", "mix_strategy=concat"),
    ("data.trainOn says what is learned; answers are learned through their stop token", "stage train_on_eos=turn is_binary_loss_scale"
     " loss_type=nll loss_type=chunked_nll ignore_pad_token_for_loss use_chat_template"),
    ("packing fills sequences as far as samples go; without it a step's samples are joined without padding", "pad_to_sequence_len"
     " *sample_packing* *multipack* eval_packing packing_* batch_flattening padding_* pad_to_multiple_of"
     " pretraining_sample_concatenation truncation_mode"),
    ("tokens are made once and kept on disk", "dataloader_* dataset_num_proc *preprocess* remove_unused_columns *streaming"
     " overwrite_cache group_by_length tokenized_path lazy_tokenize load_from_cache_file dataset_prepared_path dataset_processes"
     " dataset_shard* dataset_dir buffer_size dataset_kwargs dataset_keep_in_memory length_column_name label_names download_mode strict"
     " *data_shared_file_system* cached_* num_dataset_shards* *num_workers load_data_args media_dir ds_type"),
    ("the model's vocabulary stays as it is: add tokens to the model's folder first", "*special_tokens* pad_token bos_token unk_token"
     " fix_untrained_tokens mean_resizing_* shrink_embeddings"),
    ("the model's own folder has its configuration and its tokenizer", "tokenizer_* use_fast_tokenizer use_slow_tokenizer model_type"
     " type_of_model *_model_config base_model_config model_init_kwargs rope_* is_*_derived_model output_router_logits device_map"
     " max_memory max_model_len *local_repo_path model_kwargs init_strategy processor_kwargs adapter_folder offload_folder"),
    ("the trainer chooses its own kernels; the update is the same", "*attn_impl* attn_implementation flash_attn* *_attention use_flash_*"
     " *liger* use_unsloth* unsloth_* torch_compile* tf32 use_cache gradient_checkpointing_kwargs use_reentrant* ddp ddp_*"
     " low_cpu_mem_usage lora_*_kernel cut_cross_entropy plugins chunked_cross_* tiled_mlp* use_kt kt_* *_kernels experts_impl*"
     " deepcompile flash_optimum sdpa_* fused_* *_backend tuner_backend use_v1_kernels torch_empty_cache_steps gc_*"
     " activation_checkpointing* selective_checkpointing* use_cpu device heads_k_stride ring_attn_func moe_grouped_* use_logits_to_keep"
     " enable_npu_* flex_attn_* use_swift_lora gpu_memory_limit *profile* skip_memory_metrics *moe* dsv4_* gemma4_* nvfp4_*"
     " block_diag_attn nonexpert_quantization max_packed_sequence_len *_model_loading experimental_* ignore_bias_buffers"),
    ("zeroStage: Stage3 cuts the model over all ranks, and nothing cuts single layers or samples", "tensor_parallel_size"
     " pipeline_parallel_size context_parallel_size sequence_parallel_* expert_parallel_* parallelism_config hyper_parallel_*"
     " virtual_pipeline_*"),
    (STAGE3, "fsdp fsdp_* dp_shard_size dp_replicate_size zero_hpz_partition_size"),
    (DEEPSPEED, "deepspeed deepspeed_* accelerator_config ds3_gather_*"),
    ("optimization.offload moves the optimizer's state alone; recompute saves activations", "*_offloading lora_on_cpu"),
    ("Lockstep starts the ranks: their number follows from --nodes and --gpus-per-node, or from the cluster file",
     "local_rank world_size launcher nproc_per_node nnodes node_rank master_addr master_port cuda_visible_devices ray_* use_ray cluster"
     " *num_gpus *num_nodes resources_per_worker"),
    ("every step is logged; it costs no collective of its own", "logging_* log_level* include_* plot_loss disable_tqdm log_on_each_node"
     " debug print_* eval_causal_lm_metrics compute_accuracy enable_channel_loss acc_strategy average_tokens_across_devices"
     " use_otel_metrics otel_* total_*num_tokens log_interval log_steps"),
    ("all files of the job are in runs/JOB of the workspace", "output_dir logging_dir overwrite_output_dir run_name save_safetensors"
     " safe_serialization max_shard_size cache_dir paths project save_on_each_node create_checkpoint_symlink experiment_name"),
    ("evaluation always takes a fixed subset; for all that is held out let evaluation.samples be larger than it", "eval_dataset_type"),
    ("evaluation.everySteps counts steps, and each evaluation takes a fixed subset with optimization.microBatchSize",
     "*eval_strategy evaluation_strategy evals_per_epoch do_eval per_device_eval_batch_size eval_* batch_eval_metrics"
     " prediction_loss_only max_eval_samples val_dataset_sample"),
    ("evaluation measures the loss, and generates no text", "predict_with_generate do_predict generation_* max_new_tokens do_*_eval"
     " use_kv_cache extra_eval_args do_sample temperature top_p top_k num_beams repetition_penalty length_penalty stop_words gradio_*"
     " lm_eval_* bench_* generate_samples num_generation_samples sglang_* vllm_* infer_dtype stream logprobs top_logprobs structured_*"),
    ("checkpoint.everySteps counts steps, 100 by default", "save_strategy saves_per_epoch save_first_step auto_resume_from_checkpoints"
     " dynamic_checkpoint* enable_jit_checkpoint resume_only_model ignore_data_skip restore_callback_states_*"),
    ("the best checkpoint is always kept", "load_best_model_at_end metric_for_best_model greater_is_better"),
    ("the trainer runs no code that a model or a file brings", "trust_remote_code"),
    ("nothing is uploaded; lockstep adapter push sends the adapter to the hub afterwards", "push_to_hub* hub_* push_dataset_to_hub"
     " merge_lora merge_method"),
    ("Lockstep asks the Hugging Face hub, always; a token goes into spec.env, from a Secret", "use_hf *_hub_token *api_key"
     " hf_use_auth_token use_auth_token"),
    ("a tracker's own variables go into spec.env", "wandb wandb_* mlflow_* hf_mlflow_* with_tracking"),
    ("a tracker that Lockstep doesn't have", "swanlab_* use_swanlab comet_* use_comet trackio_* use_trackio"),
    ("the towers that see or hear are never trained", "freeze_vision_tower freeze_multi_modal_projector freeze_vit freeze_aligner"),
    ("the name of the file is enough", "do_train task_type lora_task_type check_model ignore_args_error axolotl_config_path"),
)  # fmt: skip
"""Reason why keys become no field, and forms of these keys, or KEY=VALUE. Those of `_DIFFER` change what is learned."""
_ROWS = tuple((reason, form) for rows, before in ((_DIFFER, DIFFERS), (_LEFT_OUT, "")) for text, forms in rows
              for reason, form in ((before + text, form) for form in forms.split()))  # fmt: skip


def left_out(path: str, value: object = True) -> str:
    """Return why a key becomes no field: by its path, by its last part, by the section that it is in."""
    sections = path.lower().split(".")
    for name in (path, sections[-1], *sections[-2::-1]):
        for asked in (f"{name}={str(value).lower()}", name):
            for reason, form in _ROWS:
                if ("=" in form) is (asked is not name) and fnmatchcase(asked, form):
                    return reason if is_on(value) or asked is not name else reason.removeprefix(DIFFERS)
    return "a variable of the environment: spec.env takes it" if path.isupper() else NO_SETTING
