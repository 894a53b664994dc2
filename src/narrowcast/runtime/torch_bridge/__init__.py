"""Between torch and the pure half: dtypes and formats, overloads and op ids, schemas and facts."""

from narrowcast.runtime.torch_bridge.dtypes import (
    DTYPES as DTYPES,
    FORMATS as FORMATS,
    LOW as LOW,
    default_dtype as default_dtype,
    short_type as short_type,
    to_dtype as to_dtype,
)
from narrowcast.runtime.torch_bridge.ops import (
    OpFacts as OpFacts,
    Slot as Slot,
    defaults_after as defaults_after,
    find_op as find_op,
    find_registered as find_registered,
    id_with_dtype as id_with_dtype,
    is_pointwise as is_pointwise,
    is_random as is_random,
    op_facts as op_facts,
    op_id as op_id,
    ops_in as ops_in,
    overload_with_dtype as overload_with_dtype,
    overloads_in as overloads_in,
)
from narrowcast.runtime.torch_bridge.rules import check_ops as check_ops, ops_of as ops_of
from narrowcast.runtime.torch_bridge.tensors import (
    PLAIN as PLAIN,
    cast as cast,
    device_type_of as device_type_of,
    is_weight as is_weight,
    number_as_tensor as number_as_tensor,
    part_of as part_of,
    tensors_in as tensors_in,
    values_of as values_of,
)
