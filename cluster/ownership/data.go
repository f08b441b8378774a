package ownership

import (
	"errors"

	"github.com/weirlimit/weir/algo"
)

// Slot names a follower of a partition's holder.
type Slot int

// The followers that a holder can have.
const (
	Backup Slot = 0 // the process that claims the partition when its holder is lost
	Target Slot = 1 // the process that the partition is being moved to, when that is not the backup
)

// ErrFull is what Data.Apply returns, or wraps, when there is no room for the copy.
var ErrFull = errors.New("ownership: no room for a copy")

// Data is what a node holds of the partitions: live states where it decides, copies where it follows. The core calls it
// with the lock of nothing held and never blocks in it for longer than the partition's size demands.
//
// Of each partition there is the content (the holder's own, or a follower's copy) and beside it a staging area, in
// which a whole copy is received before it takes the content's place.
type Data interface {
	// Open lets checks of the partition be decided. Shut ends that: no decision is in progress any more when it returns.
	Open(p int)
	Shut(p int)
	// Lease lets strict rules be decided until the given instant of the boot clock, and not at all from then on.
	Lease(p int, until int64)
	// Unguarded says whether strict rules may be decided, and answers to them given, while no backup is current.
	Unguarded(p int, may bool)

	// Attach gives the partition a follower that has nothing: everything is pending for it. With all false what is kept
	// under a durability of none is left out. AttachCurrent gives it one that has exactly this content already.
	Attach(p int, s Slot, all bool)
	AttachCurrent(p int, s Slot, all bool)
	// Widen makes pending what all false has left out so far, and leaves nothing out from then on.
	Widen(p int, s Slot)
	// Caught marks the follower as current: from now on answers wait for it where their durability says so.
	Caught(p int, s Slot)
	Detach(p int, s Slot)
	// Changed calls do with every partition that has come to have something pending for a follower, where nothing was,
	// since Changed was called last; it may name others as well.
	Changed(do func(p int))
	// Pending is the number of keys with changes that have not been drained for a follower. It needs no lock.
	Pending(p int, s Slot) int
	// Drain takes pending changes as a chunk, of about the given number of bytes unless one key alone has more. version is
	// what Confirm is to be called with once the follower has this chunk and all before it. more says that the chunk does
	// not hold everything that is pending.
	Drain(p int, s Slot, now algo.Instant, most int) (chunk []byte, version uint64, more bool)
	// Confirm says that the follower has everything up to a version. While Awaited says that it does not matter soon, it may
	// be left out: the next one says more.
	Confirm(p int, s Slot, version uint64)
	Awaited(p int) bool

	// Stage empties the staging area. Apply adds a chunk to it or to the content; an error leaves the copy useless.
	Stage(p int)
	Apply(p int, staged bool, now algo.Instant, chunk []byte) error
	// Promote makes the staging area the content, in place of what that was.
	Promote(p int)
	// Merge makes the content the join of itself and the staging area: of two counts of a key the larger, at every instant. The
	// content stays open if it is; everything is pending for the followers.
	Merge(p int, now algo.Instant) error
	// Discard drops the content and the staging area.
	Discard(p int)

	// TakeOver begins an unplanned claim on the content. What the lost holder may have admitted ahead of its copy (escrow)
	// is charged at now, except to strict rules: that is what TakeOverStrict is for, when the lost holder's lease has run out.
	TakeOver(p int, now algo.Instant)
	TakeOverStrict(p int, now algo.Instant)
	// Cold says that what an earlier holder counted is lost: from now on a key starts full, as if its limit had been used
	// up at this instant, where its policy's cold_start is closed. ColdStrict does the same to every key of strict rules,
	// known or not.
	Cold(p int, now algo.Instant)
	ColdStrict(p int, now algo.Instant)
}
