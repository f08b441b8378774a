package limiter

import (
	"context"
	"time"

	"golang.org/x/sync/errgroup"
)

// retryPause is how long a node waits before it looks again for the holder of a partition that the node it asked does
// not take itself for: the time in which gossip brings two views together.
const retryPause = 5 * time.Millisecond

// run carries out prepared operations wherever they are decided, and fills in every Outcome: with a decision by
// on_error where nobody could be asked in time.
func (l *Limiter) run(ctx context.Context, ops []Op) {
	t := l.table.Load()
	var away []*Op
	now := l.clock()
	for i := range ops {
		op := &ops[i]
		if l.cfg.Ownership.Holder(op.partition).Self {
			l.decide(t, op, now)
		} else {
			away = append(away, op)
		}
	}
	if len(away) > 0 {
		ctx, cancel := context.WithDeadline(ctx, l.deadline(ctx))
		defer cancel()
		l.forward(ctx, away)
	}
}

// deadline is the instant until which other nodes may be waited for: early enough for an answer by on_error to reach the
// caller within its own deadline.
func (l *Limiter) deadline(ctx context.Context) time.Time {
	now := time.Now()
	left := l.cfg.Timeout
	if d, ok := ctx.Deadline(); ok {
		caller := d.Sub(now)
		left = min(left, caller-min(caller/5, 20*time.Millisecond))
	}
	return now.Add(left)
}

// forward has operations decided by their holders, those of different holders side by side. A node that says it is not
// the holder is believed: nothing was done, so asking again elsewhere charges nothing twice.
func (l *Limiter) forward(ctx context.Context, ops []*Op) {
	for {
		groups := make(map[Holder][]*Op)
		for _, op := range ops {
			h := l.holder(op)
			groups[h] = append(groups[h], op)
		}
		var side errgroup.Group
		for h, group := range groups {
			if len(groups) == 1 {
				l.ask(ctx, h, group)
				break
			}
			side.Go(func() error { l.ask(ctx, h, group); return nil })
		}
		_ = side.Wait() // ask reports in the operations' outcomes
		again := ops[:0]
		for _, op := range ops {
			switch out := &op.Outcome; {
			case out.NotHolder != nil && ctx.Err() == nil:
				if hint := out.NotHolder; hint.Name != "" && op.followed.Less(hint.Term) {
					op.hint = hint
				}
				again = append(again, op)
			case out.NotHolder != nil || out.Unreachable:
				l.unreachable(op)
			}
		}
		if ops = again; len(ops) == 0 {
			return
		}
		select {
		case <-time.After(retryPause):
		case <-ctx.Done():
		}
		for _, op := range ops {
			op.Outcome = Outcome{}
		}
	}
}

// holder is whom to ask next: the hint a node gave, once, otherwise the one this node's own view names. It notes the
// highest term that was followed, so that an old hint, which leads back to where the operation has been, is not.
func (l *Limiter) holder(op *Op) Holder {
	var h Holder
	if op.hint != nil {
		h, op.hint = *op.hint, nil
	} else {
		h = l.cfg.Ownership.Holder(op.partition)
	}
	if op.followed.Less(h.Term) {
		op.followed = h.Term
	}
	return h
}

// ask has one holder decide, be it this node.
func (l *Limiter) ask(ctx context.Context, h Holder, ops []*Op) {
	switch {
	case h.Self:
		t, now := l.table.Load(), l.clock()
		for _, op := range ops {
			l.decide(t, op, now)
		}
	case h.Name == "" || l.cfg.Peers == nil:
		for _, op := range ops {
			op.Outcome.Unreachable = true
		}
	default:
		for _, op := range ops {
			op.Hops++
		}
		l.cfg.Peers.Forward(ctx, h, ops)
		for _, op := range ops {
			op.Hops--
		}
	}
}

// unreachable answers an operation whose holder could not be asked in time.
func (l *Limiter) unreachable(op *Op) {
	op.Outcome = Outcome{}
	e := l.table.Load().entryOf(op)
	op.Outcome.Err = suits(e, op)
	switch {
	case op.Outcome.Err != nil:
		l.countError(e, op)
	case op.asks():
		l.fail(e, op)
	default:
		op.Outcome.Err = &Error{Unavailable, "", "the node that decides for this key cannot be reached; whether the call was carried out is not known"}
	}
}

// Receive carries out operations that a peer sent. What this node does not decide is handed on once, where the
// operation's hops allow, and otherwise answered NotHolder with a hint. When something is to be handed on, the rest of
// the work is returned as a function that waits for it; nil means that every Outcome is there already.
func (l *Limiter) Receive(ops []*Op) (rest func(context.Context)) {
	t := l.table.Load()
	now := l.clock()
	var away map[Holder][]*Op
	for _, op := range ops {
		if op.Outcome.Err = l.prepare(op); op.Outcome.Err != nil {
			continue
		}
		h := l.cfg.Ownership.Holder(op.partition)
		switch {
		case h.Self:
			l.decide(t, op, now)
		case op.Hops+1 >= MaxHops || h.Name == "":
			hint := h // a copy, so that h need not live on the heap for every operation
			op.Outcome.NotHolder = &hint
		default:
			if away == nil {
				away = make(map[Holder][]*Op)
			}
			away[h] = append(away[h], op)
		}
	}
	if away == nil {
		return nil
	}
	return func(ctx context.Context) {
		var side errgroup.Group
		for h, group := range away {
			side.Go(func() error { l.ask(ctx, h, group); return nil })
		}
		_ = side.Wait() // ask reports in the operations' outcomes
	}
}
