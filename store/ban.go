package store

import (
	"time"

	"github.com/weirlimit/weir/algo"
)

// A ban is kept in the record, beside the state and not in it: algorithms know nothing of bans. It goes wherever the record goes, and
// like every instant it crosses the wire as what is left of it. It ends by the passing of time, so that nobody is told of that.

// banWords is how many words a record has for a ban.
func banWords(ban time.Duration) int {
	if ban > 0 {
		return 1
	}
	return 0
}

// banEnd is the Mono instant at which the ban of a record ends that has bannedFlag.
func (r record) banEnd() int64 { return int64(r.words[headWords+r.spec.words]) }

// ban has the key of a record, whose rule has a Ban, banned until a Mono instant.
func (r record) ban(until int64) {
	r.words[headWords+r.spec.words] = uint64(until)
	r.set(bannedFlag)
}

// lift ends the ban of a record, if it has one.
func (r record) lift() { r.clear(bannedFlag) }

// banLeft is for how long the key of a record is banned; 0: it is not.
func (r record) banLeft(now algo.Instant) time.Duration {
	if !r.has(bannedFlag) {
		return 0
	}
	return max(time.Duration(r.banEnd()-r.state.Latest(now).Mono), 0)
}

// changeBan moves the end of a ban that began when the rule's Ban was another one. One that is over stays so.
func (r record) changeBan(before time.Duration, now algo.Instant) {
	if r.banLeft(now) > 0 && r.spec.rule.Ban != before {
		r.ban(r.banEnd() + int64(r.spec.rule.Ban-before))
	}
	if r.banLeft(now) == 0 {
		r.lift()
	}
}

// banLeft is record.banLeft for a call: a ban that is over is lifted, so that the next call takes the shorter way.
func (sh *shard) banLeft(r record, now algo.Instant) time.Duration {
	left := r.banLeft(now)
	if left == 0 && r.has(bannedFlag) {
		r.lift()
	}
	return left
}

// refuseBanned refuses a request because of a ban that lasts so much longer. What it says besides is how the limits stand.
func (sh *shard) refuseBanned(r record, now algo.Instant, left time.Duration, request *algo.Request, each []algo.Decision, answer *Answer) {
	limits, look := r.spec.rule.Limits, *request
	sh.counted(r, func() {
		pass := max(look.Cost, 1)
		if look.Partial {
			pass = 1
		}
		if room := limits.Room(sh.arena, r.state, now); room-look.Held >= pass {
			look.Cost = 0 // it would pass: a peek says the same and charges nothing
		}
		_ = limits.DecideTo(sh.arena, r.state, now, &look, each, &answer.Decision) // neither a peek nor a refusal needs memory
	})
	answer.banned(left, false)
}

// banned makes an answer that of a key which is banned for so much longer; spent is Call.Spent.
func (a *Answer) banned(left time.Duration, spent bool) {
	if a.Banned, a.Free = true, a.Remaining; spent {
		return
	}
	a.Allowed, a.Remaining, a.Delay = false, 0, 0
	if a.RetryAfter != algo.Never {
		a.RetryAfter = max(a.RetryAfter, left)
	}
	a.ResetAfter = max(a.ResetAfter, left)
}

// bans says whether the answer to a call begins a ban: it is a refusal, for want of room and for nothing else. There is none while a
// part of what is in use may turn out not to be: on loan, of an atomic check that is in flight, or put in the place of what was lost.
func (sh *shard) bans(part *partition, k *Key, rule *Rule, now algo.Instant, call *Call, request *algo.Request, d *algo.Decision) bool {
	if rule.Ban == 0 || d.Allowed || call.Cost <= 0 || call.Spent || d.RetryAfter == algo.Never || request.Held > 0 || part.lostOf(rule, now).is {
		return false
	}
	if part.extras == nil || part.extras.reservations.count == 0 {
		return true
	}
	held := part.extras.reservations.by[stateID{rule.Scope, k.Key}]
	return held == nil || !held.inFlight(now.Mono)
}

// ban gives the record at a slot of the base the ban of a record of add, where that ends later.
func (m *merge) ban(slot uint32, r record) error {
	left := r.banLeft(m.now)
	if left == 0 {
		return nil
	}
	to := m.sh.record(m.base.ref(slot))
	if to.spec.rule.Ban == 0 {
		m.base.lose(to)
		if _, err := m.sh.adopt(&m.base.table, slot, r.spec.rule, m.now); err != nil {
			return err
		}
		to = m.sh.record(m.base.ref(slot))
	}
	if left = min(left, to.spec.rule.Ban); to.banLeft(m.now) < left {
		to.ban(to.state.Latest(m.now).Mono + int64(left))
	}
	return nil
}
