"""The eager front end: regions, kernels at the Autocast keys."""

from narrowcast.frontends.eager.caching import cache_info, invalidate
from narrowcast.frontends.eager.call_hook import ask_at_calls
from narrowcast.frontends.eager.functions import custom_bwd, custom_fwd
from narrowcast.frontends.eager.pins import pin, unpin
from narrowcast.frontends.eager.region import autocast
from narrowcast.frontends.eager.threads import carry
from narrowcast.runtime.regions.pinned import begin_watching

__all__ = [
    "autocast",
    "cache_info",
    "carry",
    "custom_bwd",
    "custom_fwd",
    "invalidate",
    "pin",
    "unpin",
]

begin_watching(ask_at_calls)
