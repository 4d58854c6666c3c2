"""`forerun tune`: measures a target and drafters on the user's prompts and says what to use.

    replay      the target answers; behind each of its tokens every drafter is asked what comes next
    costs       seconds of the target by shape, of a drafter by rows and draft length
    probe       seconds of everything around them, through a real stack over loopback
    prediction  tokens per second of a pool, a draft length and a number of replicas
    run         all of it in order

See docs/tune.md for the formula.
"""
