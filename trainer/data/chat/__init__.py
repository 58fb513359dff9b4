"""Chats: conversations from files become tokens, each with whether it is trained on.

conversation   what a conversation is, and what is wrong with a bad one
formats        a record of a file -> a conversation, in the formats that are common
records        JSONL and parquet files -> records, each with its place
template       a chat template, rendered as transformers renders it
masking        a conversation -> its tokens, and which of them are trained on
store          all conversations of some files, tokenized once and kept
source         samples of them: packed conversations, or pairs of which one is preferred
show           conversations on a terminal, what is trained on in colour
"""
