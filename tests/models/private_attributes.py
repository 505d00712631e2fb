"""Private attributes of Keras and KerasHub that the package uses; see test_compat.py.

`{class: names}` of attributes and methods that are read, called or overridden. TorchLayer is a
base class of `keras.Layer` on torch.
"""

PRIVATE_ATTRIBUTES = {
    "keras.Layer": [
        *("_dtype_policy", "_flatten_layers", "_layers", "_non_trainable_variables", "_post_build"),
        *("_remat_mode", "_tracker", "_trainable_variables"),
    ],
    "keras.Model": [
        *("_aggregate_additional_loss", "_compile_metrics", "_initial_epoch", "_symbolic_build"),
    ],
    "keras.Operation": ["_inbound_nodes"],
    "keras.Optimizer": [
        *("_exclude_from_weight_decay", "_exclude_from_weight_decay_cache"),
        *("_exclude_from_weight_decay_pattern", "_use_weight_decay"),
    ],
    "keras.Variable": ["_value"],
    "keras.layers.Dense": ["_get_kernel_with_merged_lora", "_int4_block_size", "_kernel"],
    "keras.layers.EinsumDense": ["_get_kernel_with_merged_lora", "_kernel"],
    "keras.layers.GroupQueryAttention": [
        *("_flash_attention", "_key_dense", "_query_dense", "_value_dense"),
    ],
    "keras.layers.MultiHeadAttention": [
        *("_build_attention", "_compute_attention", "_flash_attention"),
        *("_get_common_kwargs_for_sublayer", "_key_dense", "_output_dense", "_output_shape"),
        *("_query_dense", "_value_dense"),
    ],
    "keras.optimizers.MultiOptimizer": ["_optimizer_map"],
    "keras.optimizers.Muon": ["_should_use_adamw"],
    "keras.src.backend.tensorflow.trainer.TensorFlowTrainer": [
        *("_distribute_strategy", "_maybe_symbolic_build"),
    ],
    "keras.src.backend.torch.layer.TorchLayer": ["_torch_params", "_track_variables"],
    "keras.src.ops.function.Function": ["_nodes_by_depth"],
    "keras.src.ops.node.Node": ["_keras_history"],
    "keras_hub.layers.TransformerDecoder": ["_cross_attention_layer", "_self_attention_layer"],
    "keras_hub.models.Backbone": ["_lora_enabled_layers"],
    "keras_hub.models.BartSeq2SeqLM": ["_initialize_cache"],
    "keras_hub.models.BloomCausalLM": ["_build_cache"],
    "keras_hub.models.CausalLMPreprocessor": ["_generate_preprocess_python"],
    "keras_hub.models.GPT2CausalLM": ["_build_cache"],
    "keras_hub.models.GPTNeoXCausalLM": ["_build_cache"],
    "keras_hub.models.OPTCausalLM": ["_build_cache"],
    "keras_hub.models.T5Seq2SeqLM": ["_initialize_cache"],
    "keras_hub.tokenizers.ByteTokenizer": ["_detokenize_python", "_detokenize_tf", "_tokenize_tf"],
    "keras_hub.tokenizers.SentencePieceTokenizer": [
        *("_canonicalize_detokenize_spm_inputs", "_check_vocabulary", "_detokenize_tf"),
        *("_sentence_piece_spm", "_unk_token_id"),
    ],
    "keras_hub.tokenizers.Tokenizer": [
        *("_add_special_token", "_special_token_attrs", "_update_special_token_ids"),
        "_use_tf_workflow",
    ],
    "keras_hub.src.models.bloom.bloom_attention.BloomAttention": [
        *("_alibi_layer", "_dropout_layer", "_output_dense", "_query_dense", "_softmax"),
    ],
    "keras_hub.src.models.bloom.bloom_decoder.BloomDecoder": ["_self_attention_layer"],
    "keras_hub.src.models.gpt_neo_x.gpt_neo_x_attention.GPTNeoXAttention": [
        *("_output_dense", "_qkv_dense", "_softmax"),
    ],
    "keras_hub.src.models.gpt_neo_x.gpt_neo_x_decoder.GPTNeoXDecoder": ["_self_attention_layer"],
    "keras_hub.src.utils.preset_utils.KerasPresetLoader": ["_resolve_dtype"],
}
