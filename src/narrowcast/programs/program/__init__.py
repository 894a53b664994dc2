"""The program: a graph as data, its text form, its verifier, and the edits that may change it."""

from narrowcast.programs.program.aliases import Memories as Memories, Writes as Writes, reaching as reaching
from narrowcast.programs.program.edits import (
    CastResult as CastResult,
    CastReturn as CastReturn,
    CastTogether as CastTogether,
    Edit as Edit,
    Follow as Follow,
    Hoist as Hoist,
    InsertCast as InsertCast,
    Remove as Remove,
    Reread as Reread,
    Retarget as Retarget,
    SetDtype as SetDtype,
    Share as Share,
    Why as Why,
    apply_edits as apply_edits,
    edit_records as edit_records,
)
from narrowcast.programs.program.model import (
    BACK as BACK,
    CAST as CAST,
    ENTER as ENTER,
    EXACTLY as EXACTLY,
    EXIT as EXIT,
    TENSOR as TENSOR,
    TOGETHER as TOGETHER,
    WEIGHT as WEIGHT,
    Block as Block,
    OpenedRegion as OpenedRegion,
    Operand as Operand,
    Program as Program,
    Step as Step,
    Value as Value,
    element_bytes as element_bytes,
)
from narrowcast.programs.program.text import print_program as print_program
from narrowcast.programs.program.verify import verify as verify
