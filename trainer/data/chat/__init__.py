"""Chat data: reads conversations from files, and tokenizes them with a loss mask.

formats    reads the records of chat files in the common formats, and converts them to conversations
template   renders chat templates as transformers does
masking    converts conversations to tokens and loss masks
build      turns the conversations of files into token shards
source     provides data sources for conversations (packed or not), preference pairs and labeled conversations,
           and reads conversations for display
"""
