"""Adapter for lm-evaluation-harness (Gao et al.), the package `lm_eval`, which must be installed.

`python -m keras_recurrent.lm_evaluation_harness` is the harness's command line, with the models of
this package under the name `keras_recurrent`:

    KERAS_BACKEND=jax python -m keras_recurrent.lm_evaluation_harness run --model keras_recurrent \\
      --model_args pretrained=hf://fla-hub/hgrn2-1.3B-100B,dtype=bfloat16 \\
      --tasks lambada_openai,hellaswag,piqa,arc_easy --batch_size 16
"""

from keras_recurrent.evaluation.lm_evaluation_harness import HarnessLM

__all__ = ["HarnessLM"]

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
