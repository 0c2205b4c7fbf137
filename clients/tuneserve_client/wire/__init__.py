"""The data that crosses HTTP: JSON bodies, protobuf messages, tokenizers."""
