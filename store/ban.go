package store

import (
	"time"

	"github.com/weirlimit/weir/algo"
)

// A ban is a word of the record, behind the state: the Mono instant at which it ends. Records of rules without a Ban
// have no such word. bannedFlag says that the word counts. Algorithms know nothing of bans. A ban crosses the wire as
// the time that is left of it, and ends by the passing of time, so that no message ends it.

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

// beforeBan refuses a call on a banned key, unless it is charged whatever there is room for. A ban that is over is
// lifted, so that the next call is plain.
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

// refuseBanned refuses a call because of the key's ban. What it says besides is how the limits stand.
func (sh *shard) refuseBanned(p *plan, answer *Answer) {
	limits, look := p.rule.Limits, p.request
	sh.counted(p.r, func() {
		pass := max(look.Cost, 1)
		if look.Partial {
			pass = 1
		}
		if room := limits.Room(sh.arena, p.r.state, p.now); room-look.OnLoan >= pass {
			look.Cost = 0 // it would pass: a peek says the same and charges nothing
		}
		// Neither a peek nor a refusal needs memory.
		_ = limits.DecideTo(sh.arena, p.r.state, p.now, &look, p.each, &answer.Decision)
	})
	answer.banned(p.banned, false)
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

// afterBan begins a ban with a refusal, and tells an answer of the ban that the key had before. The followers are told
// of a new ban, and its answer waits for the backup: a caller that has been told of a ban is not to be admitted because
// the holder was lost.
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

// bans reports whether the answer begins a ban: it is a refusal, for want of room and for nothing else. There is none
// while a part of what is in use may turn out not to be: on loan, of an atomic check that is in flight, or put in the
// place of what was lost.
func (p *plan) bans(call *Call, d *algo.Decision) bool {
	if p.made || d.Allowed || call.Cost <= 0 || call.Spent || d.RetryAfter == algo.Never || p.request.OnLoan > 0 ||
		p.part.lostOf(p.rule, p.now).is {
		return false
	}
	if !p.has(concernHolds) {
		return true
	}
	reserved := p.part.extras.reservations.by[p.id()]
	return reserved == nil || !reserved.inFlight(p.now.Mono)
}

// ban gives the record at a slot of the base the ban of a record of add, where that ends later.
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
