from ftopt.sync.protocol.settings import Sync as Sync
