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
	Target Slot = 1 // the receiver of a move, when it is not the backup
	Disk   Slot = 2 // the disk of this process, the holder's or the backup's, see disk.go
)

// ErrFull is what Data.Apply returns, or wraps, when there is no room for the copy.
var ErrFull = errors.New("ownership: no room for a copy")

// Data is what a node has of the partitions: live states where it decides, copies where it follows. The Core holds no
// lock when it calls a method, and a method takes no longer than the partition's size demands.
//
// Each partition has a content (the holder's states, or a follower's copy) and a staging area, which receives a whole
// copy before it replaces the content.
type Data interface {
	// Open lets checks of the partition be decided. Shut ends that: no decision is in progress any more when it
	// returns.
	Open(p int)
	Shut(p int)
	// Lease lets strict rules be decided until the given instant of the boot clock, and not at all from then on.
	Lease(p int, until int64)
	// Unguarded says whether strict rules may be decided, and their answers given, while no backup is current.
	Unguarded(p int, may bool)

	// Attach gives the partition a follower that has nothing, so that everything is pending for it. With all false,
	// keys under a durability of none are left out. AttachCurrent gives it a follower that has exactly this content
	// already.
	Attach(p int, s Slot, all bool)
	AttachCurrent(p int, s Slot, all bool)
	// Widen makes pending what all false has left out, and leaves nothing out from then on.
	Widen(p int, s Slot)
	// Caught marks the follower as current: from now on answers wait for it where their durability demands that.
	Caught(p int, s Slot)
	Detach(p int, s Slot)
	// Changed calls do with every partition that got its first pending change for a follower since the last call of
	// Changed. It may name other partitions as well.
	Changed(do func(p int))
	// Pending is the number of keys with changes that have not been drained for a follower. It needs no lock.
	Pending(p int, s Slot) int
	// Drain takes pending changes as a chunk of about the given number of bytes; one key's state may exceed it. Confirm
	// is called with version once the follower has this chunk and all before it. more says that other changes are still
	// pending.
	Drain(p int, s Slot, now algo.Instant, most int) (chunk []byte, version uint64, more bool)
	// Confirm says that the follower has everything up to a version. While Awaited is false the Core may leave a
	// Confirm out, since the next one covers it.
	Confirm(p int, s Slot, version uint64)
	// Safe is the version up to which the disk has confirmed everything, and the current backup, if there is one.
	Safe(p int) uint64
	Awaited(p int) bool

	// Stage empties the staging area. Apply adds a chunk to it or to the content, where what has changed becomes
	// pending for a disk that follows; an error leaves the copy useless.
	Stage(p int)
	Apply(p int, staged bool, now algo.Instant, chunk []byte) error
	// Promote makes the staging area the content, in place of what that was.
	Promote(p int)
	// Merge makes the content the join of itself and the staging area: at every instant the larger of a key's two
	// counts. An open content stays open. Everything becomes pending for the followers.
	Merge(p int, now algo.Instant) error
	// Discard drops the content and the staging area.
	Discard(p int)

	// TakeOver begins an unplanned claim on the content. It charges at now what the lost holder may have admitted ahead
	// of its copy (escrow), except to strict rules. TakeOverStrict charges those, once the lost holder's lease has run
	// out.
	TakeOver(p int, now algo.Instant)
	TakeOverStrict(p int, now algo.Instant)
	// Cold says that what an earlier holder counted is lost: from now on each new key of a policy with cold_start
	// closed starts full, as if its limit had been used up at this instant. ColdStrict does the same to every key of
	// strict rules, known ones included.
	Cold(p int, now algo.Instant)
	ColdStrict(p int, now algo.Instant)
}
