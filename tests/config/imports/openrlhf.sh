# Two updates of 512 samples in a step of 128 prompts, with adapters.
set -x
PROMPTS=128
N=8
ACTOR=(
   --actor.model_name_or_path models/policy  # without its critic
   --actor.adam.lr 2e-6 --actor.adam.betas 0.9 0.98 --actor.adam.weight_decay 0.1
   --actor.lr_scheduler cosine_with_min_lr --actor.min_lr_ratio 0.2 --actor.lr_warmup_ratio 0.0
   --actor.eps_clip_low_high 0.2 0.27 --actor.entropy_coef 0.001 --actor.gradient_checkpointing_enable
)
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "."}' \
   -- python3 -m openrlhf.cli.train_ppo_ray "${ACTOR[@]}" \
   --actor.num_nodes 1 --actor.num_gpus_per_node 8 --train.colocate_all \
   --vllm.num_engines 4 --vllm.tensor_parallel_size 2 --vllm.gpu_memory_utilization 0.6 --vllm.enable_sleep \
   --algo.advantage.estimator group_norm --algo.kl.init_coef 1e-3 --algo.kl.use_loss --algo.kl.estimator k3 \
   --algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0 1 \
   --algo.advantage.is_correction_enable --algo.advantage.is_correction_threshold 0.5 4.0 \
   --rollout.batch_size $PROMPTS --rollout.n_samples_per_prompt ${N} --rollout.max_new_tokens 4096 \
   --train.batch_size $((PROMPTS * N / 2)) --train.dynamic_batch_enable --train.max_tokens_per_gpu 8192 \
   --train.num_episodes 2 --train.max_epochs 1 --train.seed 7 --ds.ring_attn_size 2 \
   --reward.remote_url reward.py --reward.overlong_buffer_len 1024 --reward.overlong_penalty_factor 0.5 \
   --ds.zero_stage 3 --ds.adam_offload --ds.packing_samples --ds.lora.rank 32 --ds.lora.alpha 64 \
   --ckpt.output_dir runs/theirs --ckpt.save_steps 20 --ckpt.max_num 3 \
   --data.prompt_dataset prompts --data.input_key question --data.apply_chat_template \
   --eval.dataset held_out --eval.steps 10 --logger.wandb.key "$WANDB_KEY" --logger.wandb.project theirs
