package limiter

import (
	"slices"
	"strings"
	"sync"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
)

// parts decide for keys whose owners cannot be asked, by a part of their limits: what on_error: share says. All is this node's own: the
// owner never hears of what is counted here. The zero value is ready for use.
type parts struct {
	mu     sync.Mutex
	arena  *algo.Arena
	states map[state]*part
	bytes  int64 // of arena
	swept  int64 // the instant of the last sweep
}

// part is what one key has used of this node's part of its limits.
type part struct {
	limits algo.Limits
	state  algo.State
}

// What parts take at most. Beyond it, keys that are not known yet are refused.
const (
	maxParts     = 16 << 10
	maxPartBytes = 16 << 20
)

// Take and Give implement algo.Budget.
func (p *parts) Take(bytes int) bool {
	if p.bytes+int64(bytes) > maxPartBytes {
		return false
	}
	p.bytes += int64(bytes)
	return true
}

func (p *parts) Give(bytes int) { p.bytes -= int64(bytes) }

// divided returns limits of which each is one of n equal parts, rounded down; nil when one of them would be nothing.
func divided(limits algo.Limits, n int) algo.Limits {
	out := slices.Clone(limits)
	for i := range out {
		l := &out[i]
		if l.Limit == algo.Unlimited {
			continue
		}
		by := int64(max(n, 1))
		capacity := l.Capacity
		l.Limit /= by
		l.Capacity /= by
		if l.Limit == 0 || capacity > 0 && l.Capacity == 0 {
			return nil
		}
	}
	return out
}

// decide decides a request for a key by one of n equal parts of its limits. What cannot be decided, for want of memory or of a part
// that is more than nothing, is refused.
func (p *parts) decide(scope, key string, limits algo.Limits, n int, now algo.Instant, r algo.Request) algo.Decision {
	refused := algo.Decision{Limit: limits[0].Limit, RetryAfter: algo.Never}
	own := divided(limits, n)
	if own == nil {
		return refused
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.states == nil {
		p.states, p.arena = make(map[state]*part), algo.NewArena(p)
	}
	k := state{scope, key}
	known := p.states[k]
	switch {
	case known == nil && len(p.states) >= maxParts && !p.sweep(now):
		return refused
	case known == nil:
		known = &part{limits: own, state: make(algo.State, own.Words())}
		own.Init(known.state, now)
		p.states[state{strings.Clone(scope), strings.Clone(key)}] = known
	case !slices.Equal(known.limits, own):
		state := make(algo.State, own.Words())
		if known.limits.Convert(p.arena, known.state, now, own, state) != nil {
			return refused
		}
		known.limits, known.state = own, state
	}
	d, err := own.Decide(p.arena, known.state, now, r, nil)
	if known.limits.Idle(p.arena, known.state, now) {
		known.limits.Free(p.arena, known.state)
		delete(p.states, k)
	}
	if err != nil {
		return refused
	}
	return d
}

// sweep drops what is idle, and reports whether anything was. It looks once a second, for it looks at everything.
func (p *parts) sweep(now algo.Instant) bool {
	if p.swept != 0 && now.Mono-p.swept < int64(failedRetry) {
		return false
	}
	p.swept = now.Mono
	before := len(p.states)
	for k, known := range p.states {
		if known.limits.Idle(p.arena, known.state, now) {
			known.limits.Free(p.arena, known.state)
			delete(p.states, k)
		}
	}
	return len(p.states) < before
}

// failByPart answers an operation by this node's part of its policy's limits.
func (l *Limiter) failByPart(e *entry, op *Op, limits algo.Limits, d *limit.Decision) {
	members := 1
	if l.cfg.Members != nil {
		members = l.cfg.Members()
	}
	got := l.parts.decide(e.Name, op.Key, limits, members, l.clock(), algo.Request{Cost: op.Cost, Partial: op.Partial, Always: op.Always, Bounded: op.Bounded})
	d.Allowed, d.Granted, d.Remaining, d.Delay = got.Allowed, got.Granted, got.Remaining, got.Delay
	d.RetryAfter, d.ResetAfter = got.RetryAfter, got.ResetAfter
	d.FailedOpen, d.FailedClosed = d.Allowed, !d.Allowed
	switch {
	case d.FailedOpen:
	case e.Shadow:
		shadow(d, op.Cost)
		d.FailedOpen, d.FailedClosed = true, false
	default:
		// The owner may be back before a part has room again.
		d.RetryAfter = failedRetry
	}
}
