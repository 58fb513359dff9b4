"""Chat data: reads conversations from files, and tokenizes them with a loss mask.

formats    chat files -> records -> conversations, for the common formats
template   chat templates, rendered as in transformers
limits     limits on the CPU time and memory of rendering templates
masking    conversations -> tokens and loss mask
store      tokenized conversations, cached on disk
source     samples: packed conversations, preference pairs or labeled conversations;
           conversations for display
"""
