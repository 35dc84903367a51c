"""What a run says of its losses: by source, and whether tokens weigh alike; they need torch.

In reading order:

    loss_weights.py      a warning where microbatches differ in tokens
    source_loss.py       the loss of each source, in Megatron's log
"""
