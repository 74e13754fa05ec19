"""Text to token ids and back, for the gateway and for the workers' grammars, from GGUF or HF files."""

from shared.tokenizer.detokenizer import Detokenizer
from shared.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Detokenizer", "Tokenizer", "load_tokenizer"]
