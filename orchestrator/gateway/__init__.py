"""The stable OpenAI-compatible address in front of the engines."""

from orchestrator.gateway.guard import is_open
from orchestrator.gateway.limits import Limits
from orchestrator.gateway.route import Upstream
from orchestrator.gateway.server import Gateway

__all__ = ["Gateway", "Limits", "Upstream", "is_open"]
