package store

import (
	"time"

	"github.com/weirlimit/weir/algo"
)

// This file has bans: after a refusal a key is refused for the rule's Ban. The path of one:
//
//	afterBan         begins the ban with a refusal, if bans allows it, and tells the followers
//	beforeBan        refuses calls on the key until the ban ends; then it lifts the ban
//	merge.ban        keeps a ban in a merge; changeBan keeps it when the rule changes
//
// A ban is a word of the record, after the state: the Mono instant at which it ends. Only records of rules with a Ban
// have the word, and it counts only if the record has bannedFlag. The algorithms know nothing of bans. A chunk has the
// time that is left of a ban. Each process ends it by its own clock, so no message ends it.

// banWords returns how many words a record has for a ban.
func banWords(ban time.Duration) int {
	if ban > 0 {
		return 1
	}
	return 0
}

// banEnd returns the Mono instant at which the ban of a record with bannedFlag ends.
func (r record) banEnd() int64 { return int64(r.words[headWords+r.spec.words]) }

// ban bans the key of a record until a Mono instant. The record's rule has a Ban.
func (r record) ban(until int64) {
	r.words[headWords+r.spec.words] = uint64(until)
	r.set(bannedFlag)
}

// lift ends the ban of a record, if it has one.
func (r record) lift() { r.clear(bannedFlag) }

// banLeft returns for how long the key of a record is still banned; 0: it is not.
func (r record) banLeft(now algo.Instant) time.Duration {
	if !r.has(bannedFlag) {
		return 0
	}
	return max(time.Duration(r.banEnd()-r.state.Latest(now).Mono), 0)
}

// changeBan moves the end of a ban that began under a rule with the Ban before. A ban that is over stays over.
func (r record) changeBan(before time.Duration, now algo.Instant) {
	if r.banLeft(now) > 0 && r.spec.rule.Ban != before {
		r.ban(r.banEnd() + int64(r.spec.rule.Ban-before))
	}
	if r.banLeft(now) == 0 {
		r.lift()
	}
}

// beforeBan refuses a call on a banned key, unless the call has Always. If the ban is over, it lifts the ban, so that
// plain can decide the next call.
func (sh *shard) beforeBan(p *plan, call *Call, answer *Answer) (answered bool) {
	if p.banned = p.r.banLeft(p.now); p.banned == 0 {
		p.r.lift()
		return false
	}
	if call.Always {
		return false
	}
	sh.refuseBanned(p, answer)
	return true
}

// refuseBanned refuses a call because of the key's ban. The answer's other numbers are those of the limits.
func (sh *shard) refuseBanned(p *plan, answer *Answer) {
	limits, look := p.rule.Limits, p.request
	sh.counted(p.r, func() {
		pass := max(look.Cost, 1)
		if look.Partial {
			pass = 1
		}
		if room := limits.Room(sh.arena, p.r.state, p.now); room-look.OnLoan >= pass {
			look.Cost = 0 // the limits would allow it: a peek has the same numbers and charges nothing
		}
		// Neither a peek nor a refusal needs memory.
		_ = limits.DecideTo(sh.arena, p.r.state, p.now, &look, p.each, &answer.Decision)
	})
	answer.banned(p.banned, false)
}

// banned turns an answer into that of a key which is banned for the time left. spent is Call.Spent.
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

// afterBan begins a ban with a refusal. For a call with Always on a key that was banned before, it adds that ban to the
// answer. The answer that begins a ban waits for the backup: otherwise a caller that was told of the ban could be
// admitted after the holder was lost.
func (sh *shard) afterBan(p *plan, call *Call, answer *Answer) {
	if p.banned > 0 {
		answer.banned(p.banned, call.Spent)
		return
	}
	if !p.bans(call, &answer.Decision) {
		return
	}
	p.r.ban(int64(p.r.state[0]) + int64(p.rule.Ban))
	answer.banned(p.rule.Ban, false)
	answer.Bans = true
	sh.note(p.part, p.r, 0)
	if p.rule.Durability >= Escrow {
		answer.Ticket = max(answer.Ticket, sh.wait(p.part, p.k.Partition, p.rule))
	}
}

// bans reports whether the answer begins a ban: it is a refusal, and only because too few units are left. No ban begins
// while units that are in use may turn out to be free: units on loan, units of an atomic check that is not settled yet,
// and units that stand for a lost count (cold.go).
func (p *plan) bans(call *Call, d *algo.Decision) bool {
	if p.made || d.Allowed || call.Cost <= 0 || call.Spent || d.RetryAfter == algo.Never || p.request.OnLoan > 0 ||
		p.part.lostOf(p.rule, p.now).is {
		return false
	}
	if !p.has(concernReserved) {
		return true
	}
	reserved := p.part.extras.reservations.by[p.id()]
	return reserved == nil || !reserved.inFlight(p.now.Mono)
}

// ban gives the record at a slot of the base the ban of the record r of add, if that ban ends later.
func (m *merge) ban(slot uint32, r record) error {
	left := r.banLeft(m.now)
	if left == 0 {
		return nil
	}
	to := m.sh.record(m.base.ref(slot))
	if to.spec.rule.Ban == 0 {
		if _, err := m.sh.adopt(m.base, slot, r.spec.rule, m.now); err != nil {
			return err
		}
		to = m.sh.record(m.base.ref(slot))
	}
	if left = min(left, to.spec.rule.Ban); to.banLeft(m.now) < left {
		to.ban(to.state.Latest(m.now).Mono + int64(left))
	}
	return nil
}
