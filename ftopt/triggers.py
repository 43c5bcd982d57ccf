"""Triggers, for a method's ``trigger``: they decide when replicas synchronize before ``sync_every`` steps."""

from ftopt.methods.adaptive import QSR as QSR
from ftopt.methods.adaptive import AdaComm as AdaComm
from ftopt.methods.adaptive import LinearFDA as LinearFDA
from ftopt.methods.adaptive import LocalCondition as LocalCondition
from ftopt.methods.adaptive import PAFTRatio as PAFTRatio
from ftopt.methods.adaptive import SignalToNoise as SignalToNoise
from ftopt.methods.triggers import AnyOf as AnyOf
from ftopt.methods.triggers import Due as Due
from ftopt.methods.triggers import Every as Every
from ftopt.methods.triggers import EverySeconds as EverySeconds
from ftopt.methods.triggers import MeanMeasurements as MeanMeasurements
from ftopt.methods.triggers import Measurement as Measurement
from ftopt.methods.triggers import Measurements as Measurements
from ftopt.methods.triggers import MemberStats as MemberStats
from ftopt.methods.triggers import Progress as Progress
from ftopt.methods.triggers import RoundStats as RoundStats
from ftopt.methods.triggers import Trigger as Trigger
