"""What each function returns: the results, which `narrowcast.load` reads again."""

from narrowcast.reports.results.differences import Differences
from narrowcast.reports.results.explanation import Explanation
from narrowcast.reports.results.findings import Finding, Watching
from narrowcast.reports.results.headroom import Headroom
from narrowcast.reports.results.invariance import Invariance
from narrowcast.reports.results.ledger import Ledger
from narrowcast.reports.results.mapping import RunMapping
from narrowcast.reports.results.parity import Parity
from narrowcast.reports.results.profile import Profile
from narrowcast.reports.results.repair import Repair
from narrowcast.reports.results.result import Result
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_differences import RunDifferences
from narrowcast.reports.results.scaler_history import History
from narrowcast.reports.results.storage import StorageCheck
from narrowcast.reports.results.training import TrainingCheck

__all__ = [
    "Differences",
    "Explanation",
    "Finding",
    "Headroom",
    "History",
    "Invariance",
    "Ledger",
    "Parity",
    "Profile",
    "Repair",
    "Result",
    "Run",
    "RunDifferences",
    "RunMapping",
    "StorageCheck",
    "TrainingCheck",
    "Watching",
]
