"""The eager front end: regions, kernels at the Autocast keys, recording."""

from narrowcast.eager.caching import cache_info, invalidate
from narrowcast.eager.call_hook import ask_at_calls
from narrowcast.eager.functions import custom_bwd, custom_fwd
from narrowcast.eager.opening import changed_ops
from narrowcast.eager.pins import pin, unpin
from narrowcast.eager.record import record
from narrowcast.eager.region import autocast
from narrowcast.eager.threads import carry
from narrowcast.regions.pinned import begin_watching
from narrowcast.regions.ruling import active_region, native_region
from narrowcast.sites.python_stack import find_site

__all__ = [
    "active_region",
    "autocast",
    "cache_info",
    "carry",
    "changed_ops",
    "custom_bwd",
    "custom_fwd",
    "find_site",
    "invalidate",
    "native_region",
    "pin",
    "record",
    "unpin",
]

begin_watching(ask_at_calls)
