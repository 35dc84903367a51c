"""What a run says of its losses: by source, to a policy, and whether tokens weigh alike; they need torch.

In reading order:

    loss_weights.py      a warning where microbatches differ in tokens
    step_report.py       the losses of each step, told to the policy of the recipe
    source_loss.py       the loss of each source, in Megatron's log
"""
