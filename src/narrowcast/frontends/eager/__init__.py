"""The eager front end: regions, kernels at the Autocast keys."""

from narrowcast.frontends.eager.caching import cache_info as cache_info, invalidate as invalidate
from narrowcast.frontends.eager.call_hook import ask_at_calls
from narrowcast.frontends.eager.functions import carry as carry, custom_bwd as custom_bwd, custom_fwd as custom_fwd
from narrowcast.frontends.eager.pins import pin as pin, unpin as unpin
from narrowcast.frontends.eager.region import autocast as autocast
from narrowcast.runtime.regions.pinned import begin_watching

begin_watching(ask_at_calls)
