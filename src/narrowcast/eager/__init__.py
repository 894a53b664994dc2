"""The eager front end: regions, kernels at the Autocast keys, recording."""

from narrowcast.eager.caching import cache_info, invalidate
from narrowcast.eager.call_hook import ask_at_calls
from narrowcast.eager.functions import custom_bwd, custom_fwd
from narrowcast.eager.pins import pin, unpin
from narrowcast.eager.record import record
from narrowcast.eager.region import autocast
from narrowcast.eager.threads import carry
from narrowcast.regions.pinned import begin_watching

__all__ = [
    "autocast",
    "cache_info",
    "carry",
    "custom_bwd",
    "custom_fwd",
    "invalidate",
    "pin",
    "record",
    "unpin",
]

begin_watching(ask_at_calls)
