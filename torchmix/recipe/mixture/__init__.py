"""What a recipe says of shares: a tree of groups, and its changes over training. Files in reading order:

powers.py          sizes -> shares in proportion to a power of them
fit.py             shares of several properties -> shares of the cells where they meet
tree.py            a tree of groups -> the exact share of each stream
flats.py           what a flat may be
cells.py           what the cells of a group may be, and where each lies among its properties
groups.py          the recipe's `mixture` -> the tree
changes.py         the recipe's `schedule` -> the trees that follow, and where they hold
shares_of_part.py  a part of a recipe -> shares at the start, and stages
dynamic.py         the recipe's `dynamic`, and the tree with the shares that were decided
"""
