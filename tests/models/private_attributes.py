"""Private attributes of Keras and KerasHub that the package uses; see test_compat.py.

`{name: classes that have it}`, for attributes and methods that are read, called or overridden.
TorchLayer is a base class of `keras.Layer` on torch.
"""

PRIVATE_ATTRIBUTES = {
    # Layers
    "_dtype_policy": ("keras.Layer",),
    "_flatten_layers": ("keras.Layer",),
    "_layers": ("keras.Layer",),
    "_non_trainable_variables": ("keras.Layer",),
    "_post_build": ("keras.Layer",),
    "_remat_mode": ("keras.Layer",),
    "_torch_params": ("keras.src.backend.torch.layer.TorchLayer",),
    "_track_variables": ("keras.src.backend.torch.layer.TorchLayer",),
    "_tracker": ("keras.Layer",),
    "_trainable_variables": ("keras.Layer",),
    # Preprocessing
    "_generate_preprocess_python": ("keras_hub.models.CausalLMPreprocessor",),
    "_value": ("keras.Variable",),
    # Training
    "_aggregate_additional_loss": ("keras.Model",),
    "_compile_metrics": ("keras.Model",),
    "_distribute_strategy": ("keras.src.backend.tensorflow.trainer.TensorFlowTrainer",),
    "_exclude_from_weight_decay": ("keras.Optimizer",),
    "_exclude_from_weight_decay_cache": ("keras.Optimizer",),
    "_exclude_from_weight_decay_pattern": ("keras.Optimizer",),
    "_initial_epoch": ("keras.Model",),
    "_maybe_symbolic_build": ("keras.src.backend.tensorflow.trainer.TensorFlowTrainer",),
    "_optimizer_map": ("keras.optimizers.MultiOptimizer",),
    "_should_use_adamw": ("keras.optimizers.Muon",),
    "_symbolic_build": ("keras.Model",),
    "_use_weight_decay": ("keras.Optimizer",),
    # Graphs
    "_inbound_nodes": ("keras.Operation",),
    "_keras_history": ("keras.src.ops.node.Node",),
    "_nodes_by_depth": ("keras.src.ops.function.Function",),
    # Attention
    "_alibi_layer": ("keras_hub.src.models.bloom.bloom_attention.BloomAttention",),
    "_build_attention": ("keras.layers.MultiHeadAttention",),
    "_compute_attention": ("keras.layers.MultiHeadAttention",),
    "_cross_attention_layer": ("keras_hub.layers.TransformerDecoder",),
    "_dropout_layer": ("keras_hub.src.models.bloom.bloom_attention.BloomAttention",),
    "_flash_attention": ("keras.layers.MultiHeadAttention", "keras.layers.GroupQueryAttention"),
    "_get_common_kwargs_for_sublayer": ("keras.layers.MultiHeadAttention",),
    "_key_dense": ("keras.layers.MultiHeadAttention", "keras.layers.GroupQueryAttention"),
    "_output_dense": (
        "keras.layers.MultiHeadAttention",
        "keras_hub.src.models.bloom.bloom_attention.BloomAttention",
        "keras_hub.src.models.gpt_neo_x.gpt_neo_x_attention.GPTNeoXAttention",
    ),
    "_output_shape": ("keras.layers.MultiHeadAttention",),
    "_qkv_dense": ("keras_hub.src.models.gpt_neo_x.gpt_neo_x_attention.GPTNeoXAttention",),
    "_query_dense": (
        "keras.layers.MultiHeadAttention",
        "keras.layers.GroupQueryAttention",
        "keras_hub.src.models.bloom.bloom_attention.BloomAttention",
    ),
    "_self_attention_layer": (
        "keras_hub.layers.TransformerDecoder",
        "keras_hub.src.models.bloom.bloom_decoder.BloomDecoder",
        "keras_hub.src.models.gpt_neo_x.gpt_neo_x_decoder.GPTNeoXDecoder",
    ),
    "_softmax": (
        "keras_hub.src.models.bloom.bloom_attention.BloomAttention",
        "keras_hub.src.models.gpt_neo_x.gpt_neo_x_attention.GPTNeoXAttention",
    ),
    "_value_dense": ("keras.layers.MultiHeadAttention", "keras.layers.GroupQueryAttention"),
    # Quantized weights
    "_get_kernel_with_merged_lora": ("keras.layers.Dense", "keras.layers.EinsumDense"),
    "_int4_block_size": ("keras.layers.Dense",),
    "_kernel": ("keras.layers.Dense", "keras.layers.EinsumDense"),
    # Low-rank weights
    "_lora_enabled_layers": ("keras_hub.models.Backbone",),
    # Generation
    "_build_cache": (
        "keras_hub.models.BloomCausalLM",
        "keras_hub.models.GPT2CausalLM",
        "keras_hub.models.GPTNeoXCausalLM",
        "keras_hub.models.OPTCausalLM",
    ),
    "_initialize_cache": ("keras_hub.models.BartSeq2SeqLM", "keras_hub.models.T5Seq2SeqLM"),
    # Tokenizers
    "_add_special_token": ("keras_hub.tokenizers.Tokenizer",),
    "_canonicalize_detokenize_spm_inputs": ("keras_hub.tokenizers.SentencePieceTokenizer",),
    "_check_vocabulary": ("keras_hub.tokenizers.SentencePieceTokenizer",),
    "_detokenize_python": ("keras_hub.tokenizers.ByteTokenizer",),
    "_detokenize_tf": (
        "keras_hub.tokenizers.ByteTokenizer",
        "keras_hub.tokenizers.SentencePieceTokenizer",
    ),
    "_sentence_piece_spm": ("keras_hub.tokenizers.SentencePieceTokenizer",),
    "_special_token_attrs": ("keras_hub.tokenizers.Tokenizer",),
    "_tokenize_tf": ("keras_hub.tokenizers.ByteTokenizer",),
    "_unk_token_id": ("keras_hub.tokenizers.SentencePieceTokenizer",),
    "_update_special_token_ids": ("keras_hub.tokenizers.Tokenizer",),
    "_use_tf_workflow": ("keras_hub.tokenizers.Tokenizer",),
    # Presets
    "_resolve_dtype": ("keras_hub.src.utils.preset_utils.KerasPresetLoader",),
}
