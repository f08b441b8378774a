package store

import (
	"github.com/weirlimit/weir/algo"
)

// A refund gives back the oldest units of a key, whichever call they were charged by. It needs no lease, because it
// admits nothing. A call with a negative cost and Always is a refund whose answer is that of a peek after it.

// Refund gives units back, the oldest first, and returns how many. Under a requestID that is known for the key's
// refunds it gives back nothing and returns what the first one did; the error is ErrRequestID when that was of another
// number of units. The empty id is none. caller names the caller; empty: not known.
func (s *Store) Refund(k Key, rule *Rule, now algo.Instant, units int64, requestID,
	caller string) (n int64, err error) {
	err = s.ifOpen(k.Partition, func(sh *shard, part *partition) (err error) {
		n, err = sh.refund(part, k, rule, now, units, requestID, caller)
		return err
	})
	return n, s.refusedRoom(err, rule, caller)
}

// refund is Refund under the lock, for a partition that is open.
func (sh *shard) refund(part *partition, k Key, rule *Rule, now algo.Instant, units int64, requestID,
	caller string) (n int64, err error) {
	of := stateID{rule.Scope, k.Key}
	if requestID != "" && part.extras != nil {
		if m, ok := part.extras.answers.get(answerKey{of, requestID, answerRefund}, now.Mono); ok {
			if m.cost != units {
				return 0, ErrRequestID
			}
			return m.granted, nil
		}
	}
	err = sh.existing(part, k, rule, now, func(r record) bool {
		n = rule.Limits.Refund(sh.arena, r.state, now, units)
		return n > 0
	})
	if err == nil && requestID != "" {
		sh.rememberAnswer(part, of, answerRefund, requestID, caller, rule, now, answered{cost: units, granted: n})
	}
	return n, err
}

// refundCall answers a call of a negative cost.
func (sh *shard) refundCall(p *plan, call *Call, answer *Answer) error {
	if p.has(concernGuard) {
		// What is given back needs no lease, but the answer does: nothing is done without it.
		if err := p.part.guard(p.rule, call.Boot, answer); err != nil {
			return err
		}
	}
	n, err := sh.refund(p.part, p.k, p.rule, p.now, -call.Cost, call.RequestID, call.Caller)
	if err != nil {
		return err
	}
	look := Call{Request: algo.Request{Always: true}, Boot: call.Boot, Spent: true}
	if err := sh.decide(p.part, &p.k, p.rule, p.now, &look, p.each, answer); err != nil {
		return err
	}
	answer.Allowed, answer.Granted, answer.RetryAfter = true, -n, 0
	return nil
}
