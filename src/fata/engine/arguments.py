"""What an adapter accepts: each check says what was given, what is accepted and what to do."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parameter import UninitializedParameter

from fata.engine.fast.bfloat16 import pays_on_cpu
from fata.engine.fisher import FisherData
from fata.engine.ownership import check_free
from fata.guard.policy import Guard
from fata.methods.base import CustomStep, Method
from fata.methods.fata import Fata
from fata.network.parameters import Params

RENAMED = {"truncated": "norm-truncated", "all": "norm"}  # since 0.2


def check_model(model: nn.Module) -> None:
    """Raise for a model that cannot be adapted."""
    if not isinstance(model, nn.Module):
        loaded = isinstance(getattr(model, "model", None), nn.Module)  # of fata.zoo.load
        hint = ": give loaded.model" if loaded else ""
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}{hint}.")
    check_free(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("a TorchScript module cannot be adapted; give the nn.Module it came from.")
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise ValueError("the model has lazy layers: run a batch through it first.")
    if any(tensor.is_inference() for tensor in model.parameters()):
        raise ValueError(
            "the model was made inside torch.inference_mode(), so its parameters can never learn; "
            "make it outside (predicting inside is fine)."
        )


def check_method(method: Method, plus: Fata | None, fisher_data: FisherData | None) -> None:
    """Raise for parts that do not go together; warn of EATA without its penalty."""
    if not isinstance(method, Method):
        raise TypeError(
            f"method must be one such as fata.Tent(), got {method!r}; "
            f"fata.adapt(model, 'tent') takes names."
        )
    if plus is not None and not isinstance(plus, Fata):
        raise TypeError(f"plus must be a fata.Fata(...) or None, got {plus!r}.")
    if plus is not None and isinstance(method, CustomStep):
        raise ValueError(f"{method.name!r} has a step of its own, to which FATA cannot be added.")
    if method.balance and (isinstance(method, CustomStep) or method.params is None):
        raise ValueError(f"balance=True: {method.name!r} has no mean over rows to balance.")
    if method.blend and (isinstance(method, CustomStep) or not method.batch_statistics):
        raise ValueError(f"blend=True: {method.name!r} has BatchNorm statistics of its own.")
    if fisher_data is not None and not method.wants_fisher:
        raise ValueError(f"fisher_data: {method!r} has no Fisher penalty (fisher_alpha above 0).")
    if fisher_data is None and method.wants_fisher:
        warnings.warn(
            "no fisher_data: EATA without its penalty is ETA. Give batches of clean images as "
            "fisher_data, or say fisher_alpha=0 to mean it.",
            stacklevel=5,
        )


def check_seed(seed: int) -> None:
    """Raise for what is no whole number."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed={seed!r}: must be a whole number.")


def check_reset(batches: int | None, method: Method) -> None:
    """Raise for what is no number of batches, or where nothing can be reset."""
    if batches is None:
        return
    if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1:
        raise ValueError(
            f"reset_every={batches!r}: must be a whole number of batches, at least 1, or None."
        )
    if isinstance(method, CustomStep) and method.episodic:
        raise ValueError(
            f"reset_every={batches!r}: {method.name!r} restarts from the source weights at every "
            f"image."
        )


def check_group(group: ProcessGroup | None, speed: str) -> None:
    """Raise for what ranks cannot share."""
    if group is not None and speed == "fast":
        raise ValueError(
            "speed='fast' captures passes, and communication between ranks cannot be captured: "
            "give speed='exact' with a group."
        )


def default_speed(model: nn.Module, group: ProcessGroup | None = None) -> str:
    """`fast` for a float32 model where bfloat16 pays, GPU or CPU, and without a group."""
    floats = {p.dtype for p in model.parameters() if p.is_floating_point()}
    devices = {p.device.type for p in model.parameters()}
    if floats != {torch.float32} or group is not None:
        return "exact"
    on_gpu = devices == {"cuda"} and torch.cuda.is_bf16_supported(including_emulation=False)
    on_cpu = devices == {"cpu"} and pays_on_cpu(model, torch.device("cpu"))
    return "fast" if on_gpu or on_cpu else "exact"


def guard_of(guard: Guard | bool | None) -> Guard | None:
    """The guard that is meant."""
    if isinstance(guard, Guard):
        return guard
    if guard is not None and not isinstance(guard, bool):
        raise TypeError(f"guard={guard!r}: give True, False, None or a fata.Guard(...).")
    return Guard() if guard else None


def renamed(params: Params | None) -> Params | None:
    """The set of parameters under its present name; warns of a former one."""
    if not isinstance(params, str) or params not in RENAMED:
        return params
    now = RENAMED[params]
    later = " It will mean every parameter then, which is 'every' until then."
    warnings.warn(
        f"params={params!r} is now {now!r}; the old name goes with the next version."
        f"{later if params == 'all' else ''}",
        DeprecationWarning,
        stacklevel=5,
    )
    return now


def images_of(images: Tensor | None, inputs: Mapping[str, Tensor]) -> Tensor:
    """The images of a call: the first argument, or `pixel_values` as Hugging Face names it."""
    if images is None and inputs.keys() == {"pixel_values"}:
        return inputs["pixel_values"]
    if images is None or inputs:
        given = ", ".join(inputs) or "nothing"
        raise TypeError(
            f"an adapter takes images, or pixel_values=images alone; got {given}. Labels are never "
            f"used."
        )
    return images
