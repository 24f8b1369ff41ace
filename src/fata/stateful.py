"""The state of an adapter: in memory, in files, on the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from fata._files import save_tensors, tensor_bytes
from fata.engine import checkpoint as states
from fata.engine.checkpoint import IncompatibleKeys
from fata.engine.ownership import ModelOwner
from fata.engine.warm_up import warm_up


class Stateful(ModelOwner):
    """A module with a state that is saved, loaded and continued from."""

    _fingerprint: str | None = None

    def warm_up(self, batch_size: int, image_size: int | Sequence[int]) -> float:
        """Run all passes on noise, so that the first batches take as long as later ones.

        With `fast` on a GPU they are captured for each number of selected rows, and those of a
        large network are compiled: minutes the first time, then PyTorch has them in its cache.
        Otherwise one step is run. The state is as before. In a `group` all ranks call it.

        Args:
            batch_size: images in a batch.
            image_size: a side, (height, width) or (channels, height, width).

        Returns:
            the seconds that it took.
        """
        engine = self._live()
        with self._lock, torch.inference_mode(False), torch.enable_grad():
            engine.network.model.eval()
            engine.network.settle()
            return warm_up(engine, batch_size, image_size)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to one safetensors file; an older file there is replaced whole."""
        save_tensors(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue from a saved state; raises `StateError` for one that does not belong here.

        The rate and the guard are this adapter's own; the seed is the state's.
        """
        self.load_state_dict(states.load(path))

    def push_to_hub(
        self, repo: str, name: str = "state.safetensors", *, token: str | None = None
    ) -> str:
        """Upload the state to a repository of the Hugging Face hub, which is made if need be.

        The file says which method, model weights and version it is for.

        Args:
            repo: such as `someone/camera-states`; new ones are private.
            name: of the file there, one a stream.
            token: of the hub; None: that of `hf auth login`.

        Returns:
            the URL of the commit.
        """
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        api.create_repo(repo, private=True, exist_ok=True)
        done = api.upload_file(
            path_or_fileobj=tensor_bytes(self.state_dict()), path_in_repo=name, repo_id=repo
        )
        return str(done.commit_url)

    def from_hub(
        self,
        repo: str,
        name: str = "state.safetensors",
        *,
        revision: str | None = None,
        token: str | None = None,
    ) -> None:
        """Continue from a state on the Hugging Face hub; `StateError` if it does not belong here.

        Args:
            repo: such as `someone/camera-states`.
            name: of the file there.
            revision: a commit, branch or tag; None: the latest.
            token: of the hub; None: that of `hf auth login`.
        """
        from huggingface_hub import hf_hub_download

        self.load(hf_hub_download(repo, name, revision=revision, token=token))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """What moved and what is remembered, by name; `meta` says whose state it is.

        A larger module that an adapter is a part of asks with arguments, and gets the weights.
        """
        if args or kwargs:
            return super().state_dict(*args, **kwargs)
        with self._lock, torch.inference_mode(False):
            return states.pack(self._live(), self._source())

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> IncompatibleKeys:
        """Continue from a `state_dict`.

        Args:
            state_dict: of an adapter made alike; of another one it raises `StateError`.
            strict: False takes what fits: parameters and momentum of the same name and shape, and
                the rest only if the method and its fields are the same.

        Returns:
            `missing_keys` and `unexpected_keys`, as `nn.Module.load_state_dict` does.
        """
        engine = self._live()
        with self._lock, torch.inference_mode(False):
            engine.state, keys = states.unpack(engine, self._source(), state_dict, strict)
            engine.write()
        return keys

    def _load_from_state_dict(self, *_: Any) -> NoReturn:
        """Raise for weights that come by a larger module: the next step would undo them."""
        raise states.StateError(
            "weights cannot be loaded into an adapter as a part of a larger module: load them "
            "before fata.adapt(...), or a state by the adapter's own load(path)"
        )

    def _source(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = states.fingerprint(self._live())
        return self._fingerprint
