"""Chat data: conversations from files, tokenized with a loss mask.

formats    chat files -> records -> conversations, for the common formats
template   chat templates, rendered as transformers renders them
limits     CPU time and memory limits for rendering templates
masking    conversations -> tokens and loss mask, with the tokenizer that maps tokens to character spans
store      tokenized conversations, cached on disk
source     samples: packed conversations, or preference pairs; conversations for display
"""
