"""What every forerun service shares: types, config, engine, wire. Knows no service."""

__version__ = "0.1.0"
PROTOCOL_VERSION = 1
