"""Replicas of a Transformer under DeepSpeed ZeRO (Rajbhandari et al., arXiv 1910.02054), stages 1 and 2.

Each replica keeps 1/replicas of the optimizer's states (and, in stage 2, of the gradients). Everything is fp32 as under DDP,
bf16 by autocast, so that losses are DDP's and a checkpoint of one engine loads under the other.
"""

from __future__ import annotations

import os
from argparse import Namespace
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist

from trainers import optimizer_states
from trainers.config import RunConfig
from trainers.transformer.base import TransformerEngine
from trainers.transformer.build import Ranks
from trainers.transformer.optimizer import make_optimizer

ADAM_STATES = ("exp_avg", "exp_avg_sq")


class DeepSpeedEngine(TransformerEngine):
    def __init__(self, config: RunConfig) -> None:
        os.environ.setdefault("DS_ACCELERATOR", config.trainer.device)
        os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))  # DeepSpeed insists; `device_rank` is what counts
        import deepspeed

        super().__init__(config)
        deepspeed.utils.logging.logger.setLevel("WARNING")
        for name in self._split_names:
            self._parameters[name].tensor_model_parallel = True  # type: ignore[attr-defined]
        self._has_states = config.optim.name != "sgd"
        with redirect_stdout(StringIO()):  # it tells what it compiles
            self._module, self._optimizer, _, _ = deepspeed.initialize(
                args=Namespace(device_rank=self.device.index or 0),
                model=self.model,
                optimizer=make_optimizer(config.optim, self._parameters, states=False),
                config=_settings(config),
                mpu=_ModelParallelUnit(self._ranks),
                dist_init_required=False,
            )
        if self._has_states:
            # A checkpoint must find them before the first step, in which DeepSpeed would make them.
            optimizer_states.with_states(self._optimizer.optimizer)
            self._optimizer._lazy_init_hp_params_optimizer_state()
        self._copies: dict[str, torch.Tensor] = {}  # of optimizer states, while a checkpoint is saved or loaded

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        self._module.set_gradient_accumulation_boundary(last)
        self._module.backward(loss, scale_wrt_gas=False)

    def step(self) -> None:
        self._module.step()

    def set_learning_rate(self, factor: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.optim.lr * factor

    def model_state(self) -> dict[str, Any]:
        """Weights are whole on every replica."""
        return self._split.wrap(self._parameters)

    def optimizer_state(self) -> dict[str, Any]:
        """Copies, put together from the parts of all replicas; `loaded` takes them apart again. Collective."""
        from deepspeed.utils import safe_get_full_optimizer_state

        self._copies = {}
        for name, parameter in self._parameters.items() if self._has_states else ():
            self._copies[f"{name}|step"] = self._steps()[0].detach().clone()
            for key in ADAM_STATES:
                self._copies[f"{name}|{key}"] = safe_get_full_optimizer_state(parameter, key)
        return self._split.wrap(self._copies)

    def loaded(self) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        for name, parameter in self._parameters.items():
            safe_set_full_fp32_param(parameter, parameter.detach())
            for key in ADAM_STATES if self._has_states else ():
                safe_set_full_optimizer_state(parameter, self._copies[f"{name}|{key}"], key)
        if self._has_states:
            done = next(value for key, value in self._copies.items() if key.endswith("|step"))
            for step in self._steps():
                step.copy_(done)
        self._copies = {}

    def close(self) -> None:
        self._module.destroy()
        super().close()

    def _steps(self) -> list[torch.Tensor]:
        """Adam's step, of each group of parameters; all are the same."""
        return [state["step"] for state in self._optimizer.optimizer.state.values()]


class _ModelParallelUnit:
    """Which ranks are which, in DeepSpeed's words."""

    def __init__(self, ranks: Ranks) -> None:
        self._model, self._data = (ranks.mesh.get_group(name) for name in ("tensor", "data"))

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._model

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._model)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._model)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._data)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._data)


def _settings(config: RunConfig) -> dict[str, Any]:
    # Neither limit is left to DeepSpeed: its clipping is on unless told otherwise, and the batch size is the loop's affair.
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": config.optim.accumulate,
        "gradient_clipping": config.optim.clip_norm or 0.0,
        "zero_optimization": {"stage": config.engine.zero_stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 40,
        "torch_autocast": {
            "enabled": config.trainer.dense_dtype == "bf16",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],  # gradients travel in fp32
        },
    }
