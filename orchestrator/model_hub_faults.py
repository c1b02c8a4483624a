"""What goes wrong between us and the hub, as errors that say what to do about it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from http import HTTPStatus

from orchestrator.errors import ModelError
from orchestrator.model_hub_store import Hub


class HubUnreachable(ModelError):
    """The hub can't be asked: no network, or none wanted."""


@contextlib.contextmanager
def told(hub: Hub, repo: str) -> Iterator[None]:
    """Turn what the library raises into errors that say what to do; offline, nothing is asked at all."""
    name, page = f"model: hf:{repo}", f"{hub.endpoint}/{repo}"
    if hub.offline:
        raise HubUnreachable(
            f"{name} is not here, and HF_HUB_OFFLINE keeps from asking for it",
            advice="unset HF_HUB_OFFLINE, or copy the model into the cache from elsewhere",
        )
    import httpx2
    from huggingface_hub import errors

    _quiet()
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{name} is given to those only who have accepted its licence",
            advice=f"accept it at {page}, and set HF_TOKEN to a token of that account",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{name}: there is no such repository at {hub.endpoint}, or it is private",
            advice="check the name; for a private one set HF_TOKEN to a token that may read it",
        ) from error
    except errors.EntryNotFoundError as error:
        raise ModelError(
            f"{name} has changed meanwhile: a file is gone", advice="try again: the list is asked for anew"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise ModelError(
                f"{name}: {hub.endpoint} refuses access ({status})",
                advice=f"check HF_TOKEN: it must be valid, and of an account that may read {page}",
            ) from error
        raise HubUnreachable(
            f"{name}: {hub.endpoint} answers with status {status}", advice="try again later"
        ) from error
    except (httpx2.HTTPError, httpx2.InvalidURL, errors.OfflineModeIsEnabled) as error:
        why = str(error).lower().rstrip(".") or type(error).__name__
        raise HubUnreachable(
            f"{name}: {hub.endpoint} can't be reached: {why}",
            advice="check the network and HF_ENDPOINT, and try again: a download goes on where it stopped",
        ) from error
    except OSError as error:
        raise ModelError(
            f"{name}: {hub.cache} can't be used: {(error.strerror or str(error)).lower()}",
            path=hub.cache,
            advice="set HF_HUB_CACHE to a folder of yours with enough space",
        ) from error


def _quiet() -> None:
    """Keep the library from telling on stderr what our errors tell."""
    from huggingface_hub.utils import logging

    if "HF_HUB_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
