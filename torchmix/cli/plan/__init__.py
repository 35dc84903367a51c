"""torchmix plan. In reading order:

loaders.py   `torchmix plan RECIPE --loaders`: which loaders would read which sources
simulate.py  `torchmix plan --simulate`: what the steps would take, beside jobs without a plan
report.py    one page of HTML about a plan: predicted times, heat maps, lengths, mixture, a drawn microbatch
command.py   `torchmix plan`: the steps of a run before it runs
"""
