"""A room per verb: plan it, then run the plan. The command line and Python both call these."""
