"""What ops and casts cost on a device: measured, kept in profiles, and interpolated from them."""

from narrowcast.costs.model import CostModel, Estimate
from narrowcast.costs.profile import Device, Profile, Sample
from narrowcast.costs.signature import Signature, Work

__all__ = ["CostModel", "Device", "Estimate", "Profile", "Sample", "Signature", "Work"]
