"""Serves a language model with Ray Serve, which starts and stops replicas as the load changes.

    pip install ".[torch,serve]" "ray[serve]"
    KERAS_BACKEND=torch python guides/recipes/ray_serve.py --preset griffin_tiny_text

Each replica is one engine with OpenAI's API. Requests with the same header `X-Session-Id` go to the
same replica, which has the state of their conversation.
"""

import argparse

from ray import serve
from ray.serve.config import RequestRouterConfig

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


@serve.ingress()
class Replica:
    """A replica: one engine in a separate process."""

    def __init__(self, preset, num_slots, dtype):
        from keras_recurrent.serving import Engine

        self.name = preset
        import keras_hub

        model = keras_hub.models.CausalLM.from_preset(preset, dtype=dtype)
        self.engine = Engine(model, num_slots=num_slots)

    def __serve_build_asgi_app__(self):
        from keras_recurrent.serving.server import create_app

        return create_app(self.engine, self.name)

    def check_health(self):
        """Raises an error after a failure of the engine, so that Ray starts another replica."""
        if self.engine.is_closed:
            raise RuntimeError("The engine failed.")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", default="griffin_tiny_text")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--slots", type=int, default=16, help="per replica")
    parser.add_argument("--replicas", type=int, nargs=2, default=(1, 4), metavar=("MIN", "MAX"))
    parser.add_argument("--gpus", type=float, default=0, help="per replica")
    parser.add_argument("--port", type=int, default=8000)
    return parser.parse_args()


def start(arguments, blocking):
    """Starts Ray Serve and the replicas; returns once they answer, or never if `blocking`."""
    deployment = serve.deployment(
        Replica,
        ray_actor_options={"num_cpus": 0.5, "num_gpus": arguments.gpus},
        # More requests than slots keep the slots in use.
        max_ongoing_requests=2 * arguments.slots,
        autoscaling_config={
            "min_replicas": arguments.replicas[0],
            "max_replicas": arguments.replicas[1],
            "target_ongoing_requests": arguments.slots,
        },
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )
    serve.start(http_options={"host": "127.0.0.1", "port": arguments.port})
    replica = deployment.bind(arguments.preset, arguments.slots, arguments.dtype)
    serve.run(replica, blocking=blocking)


if __name__ == "__main__":
    start(parse_arguments(), blocking=True)
