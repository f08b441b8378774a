package simulation

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/weirlimit/weir/test/checker"
)

// all is an atomic check: a reservation of every one of its parts, made by one process, which then keeps or cancels
// all.
type all struct {
	parts    []*op
	left     int // to be answered
	admitted bool
}

// begin sends something that asks for units, and then what is to become of them.
func (r *run) begin(p *process, o *op) {
	w := r.world
	lease := o.policy.Kind == checker.Leases
	if !lease && w.chance(0.2) {
		o.hold = 200*millisecond + w.rng.Int64N(4*second)
		o.draw(w)
	}
	if lease || o.hold > 0 {
		o.done = func(o *op) {
			if o.result != checker.Admitted {
				return
			}
			if lease {
				r.leased(o)
			} else {
				w.after(w.rng.Int64N(o.hold+o.hold/4), func() { r.finish(o, w.rng.Int64N(o.cost+1)) })
			}
		}
	}
	w.ask(p, o)
}

func (o *op) draw(w *world) {
	binary.BigEndian.PutUint64(o.reservation[:], w.rng.Uint64())
}

// kept says that what has been admitted of a policy is surely still known: nothing that was told is lost, and it was
// not a moment ago that it may have been in flight.
func (r *run) kept(o *op) bool {
	switch {
	case r.history.Late >= time.Second || o.degraded:
		return false
	case r.weather <= moving:
		return true
	}
	return r.weather == crashing && o.policy.Durability >= checker.Escrow && !o.policy.Strict &&
		!slices.ContainsFunc(r.history.Crashes, func(f checker.Crash) bool { return !f.Copied })
}

func (r *run) lost(rule string, o *op, why string) {
	r.proto.Violations = append(r.proto.Violations, checker.Violation{
		Rule: rule, Text: fmt.Sprintf("%v: %s: %s of %d: %s", time.Duration(r.now), o.key.Key, o.kind, o.cost, why),
	})
}

// finish ends a reservation through any process, and often once more.
func (r *run) finish(o *op, keep int64) {
	w := r.world
	p := r.any()
	if p == nil {
		return
	}
	w.ask(p, &op{kind: settle, policy: o.policy, key: o.key, cost: o.cost, of: o, keep: keep, done: func(first *op) {
		pending := first.at < o.at+o.hold-o.hold/400
		if first.result == checker.Refused && pending && r.kept(o) {
			r.lost("a reservation forgotten", first, "not known by "+first.node)
		}
		if first.result != checker.Admitted || !w.chance(0.3) {
			return
		}
		if p := r.any(); p != nil {
			w.ask(p, &op{kind: settle, policy: o.policy, key: o.key, cost: o.cost, of: o, keep: keep,
				done: func(again *op) {
					differs := again.result == checker.Refused ||
						again.result == checker.Admitted && again.returned != first.returned
					if differs && r.weather <= moving && w.history.Late < time.Second {
						r.lost("a settle answered in two ways", again,
							fmt.Sprintf("%d and %d came back", first.returned, again.returned))
					}
				}})
		}
	}})
}

// leased renews a lease, or releases it, or does neither.
func (r *run) leased(o *op) {
	w := r.world
	ttl := int64(o.policy.Window)
	k := renew
	switch n := w.rng.IntN(4); {
	case n == 0:
		return
	case n < 3:
		k = release
	}
	w.after(w.rng.Int64N(ttl+ttl/8), func() {
		p := r.any()
		if p == nil {
			return
		}
		begun := max(o.at, o.history.Renewed)
		w.ask(p, &op{kind: k, policy: o.policy, key: o.key, cost: o.cost, of: o, done: func(e *op) {
			if e.result == checker.Refused && e.at < begun+ttl-ttl/400 && r.kept(o) {
				r.lost("a lease forgotten", e, "not known by "+e.node)
			}
			if e.result == checker.Admitted && k == renew {
				if e.at > o.history.Renewed {
					o.history.Renewed, o.history.Renewer = e.at, e.node
				}
				r.leased(o)
			}
		}})
	})
}

// together asks about several keys at once, all or none.
func (r *run) together(p *process) {
	w := r.world
	a := &all{}
	for range 2 + w.rng.IntN(2) {
		pol := w.policies[w.rng.IntN(len(w.policies))]
		key := &pol.keys[w.rng.IntN(len(pol.keys))]
		if pol.Kind == checker.Leases ||
			slices.ContainsFunc(a.parts, func(o *op) bool { return o.key.Key == key.Key }) {
			continue
		}
		o := &op{policy: pol, key: key, cost: 1 + w.rng.Int64N(2), hold: 3 * second, all: a}
		o.draw(w)
		a.parts = append(a.parts, o)
	}
	a.left = len(a.parts)
	for _, o := range a.parts {
		o.done = func(*op) {
			if a.left--; a.left == 0 {
				p.do(func() { r.conclude(p, a) })
			}
		}
		w.ask(p, o)
	}
}

// conclude answers an atomic check once all of its parts have been, and keeps or cancels them.
func (r *run) conclude(p *process, a *all) {
	a.admitted = !slices.ContainsFunc(a.parts, func(o *op) bool { return o.result != checker.Admitted })
	for _, o := range a.parts {
		if o.result == checker.Refused {
			continue
		}
		keep := int64(0)
		if a.admitted {
			keep = o.cost
		}
		r.world.ask(p, &op{kind: settle, policy: o.policy, key: o.key, cost: o.cost, of: o, keep: keep})
	}
}
