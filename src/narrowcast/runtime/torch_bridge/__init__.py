"""Between torch and the pure half: dtypes and formats, overloads and op ids, schemas and facts."""

from narrowcast.runtime.torch_bridge.dtypes import DTYPES, FORMATS, LOW, default_dtype, short_type, to_dtype
from narrowcast.runtime.torch_bridge.ops import (
    OpFacts,
    Slot,
    defaults_after,
    find_op,
    find_registered,
    id_with_dtype,
    is_pointwise,
    is_random,
    op_facts,
    op_id,
    ops_in,
    overload_with_dtype,
    overloads_in,
)
from narrowcast.runtime.torch_bridge.rules import check_ops, ops_of
from narrowcast.runtime.torch_bridge.tensors import (
    cast,
    device_type_of,
    is_weight,
    number_as_tensor,
    part_of,
    tensors_in,
    values_of,
)

__all__ = [
    "DTYPES",
    "FORMATS",
    "LOW",
    "OpFacts",
    "Slot",
    "cast",
    "check_ops",
    "default_dtype",
    "defaults_after",
    "device_type_of",
    "find_op",
    "find_registered",
    "id_with_dtype",
    "is_pointwise",
    "is_random",
    "is_weight",
    "number_as_tensor",
    "op_facts",
    "op_id",
    "ops_in",
    "ops_of",
    "overload_with_dtype",
    "overloads_in",
    "part_of",
    "short_type",
    "tensors_in",
    "to_dtype",
    "values_of",
]
