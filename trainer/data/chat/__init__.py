"""Chat data: conversations from files, tokenized with a loss mask.

conversation   data types for conversations, and the error for invalid ones
formats        file records -> conversations, for the common formats
records        JSONL and parquet files -> records with their file and line
template       chat templates, rendered as transformers renders them
limits         CPU time and memory limits for rendering templates
tokens         the chat tokenizer, which maps tokens to character spans
masking        conversations -> tokens and loss mask
store          tokenized conversations, cached on disk
source         samples: packed conversations, or preference pairs
show           the first conversations of a file, split into trained and ignored text
"""
