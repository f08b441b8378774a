package model

// rule is something that the protocol does for safety's sake, and that a model can leave out.
type rule uint64

const (
	// The five rules of grants.
	countPerTerm  rule = 1 << iota // 1: support counts only for the partition and term it was given for
	checkRenewals                  // 2: a renewal is held to the record
	exactRelease                   // 3: a proof of release names exactly the recorded process and term
	readRecords                    // 4: a voter that restarted reads the others' records
	risingTerms                    // 4: whoever takes over uses a higher term than all it knows of
	abstain                        // 5: a voter that restarted abstains for as long as a record lives
	// Time.
	leaseFromSending  // the holder counts from the sending of its request
	longRecord        // the voter's record outlives the lease whatever the clocks' rates
	boundFromQuestion // a forwarder counts an answer's lease from the sending of its question
	// Reading and epochs.
	abstainFirst // the reading begins once the voter has abstained
	coldEpoch    // what was recorded in an earlier epoch entitles nobody to his copy
	clockEpochs  // a new epoch's number is above all ever used, not only above those that the voter could learn
	// Who has a copy.
	guardRecorded   // without a copy, strict answers wait until a majority has recorded that there is none
	guardAfterGrant // a backup is recorded only once the holder has a grant
	marksTravel     // and only once it has the mark that keys start full
	orderedGens     // a voter takes no older word on the backup than the one it has
	readGens        // and a voter that reads records learns how old their word is
	repeatReplaced  // a voter repeats in each grant what record was replaced
	copyIdentity    // a copy entitles its keeper only if it is of the recorded holder and term
	wholeRelease    // a commit says whether its content is whole for strict rules
	holeKnown       // a process that never had a grant does not take its own content for whole
	// Contents.
	freeze         // nothing is decided after the commit was made
	finalDrain     // the commit holds the last changes
	stageCopies    // a whole copy replaces the one before only when it is complete
	ackAfterApply  // a follower confirms what it has applied
	chargeEscrow   // a claimant charges what the lost holder may have spent ahead
	backupConfirms // while a commit is in progress answers go on waiting for the recorded backup, not for the receiver
	commitTerm     // the sender of a commit takes the term that its receiver will have for used
	commonVersion  // copies of one term are compared by what they hold, not by the number of messages they took
	risingSequence // a follower's stream never begins again at 1 under the same term
	// Loans.
	lendAfterCopy  // a borrower has a loan once the backup has confirmed it
	loansTravel    // what is on loan is part of what copies and commits hold
	endCharges     // a loan that ends counts as spent
	promiseOnQuery // who has answered a claimant's query takes nothing from the earlier holder
)

// model is a set of bounds, and the rules that are left out.
type model struct {
	Nodes, Voters int
	Admissions    int
	Lease         uint8 // ticks
	Escrow        bool  // otherwise answers wait for the copy
	Guarded       bool  // in the beginning node B has a copy and is recorded as the backup
	AtomicCopies  bool  // a copy or change reaches a follower in one step; only the confirmation may be lost
	LateReplies   bool  // voters' replies may be late, not only lost
	Forwarding    bool  // one check comes through a forwarder
	Loans         bool  // an admission may be lent, and be made by its borrower at any time later, or never

	// Bounds on what happens.
	Claims, Moves, Crashes, Restarts, Gens, Attaches, Requests int

	Without rule
}

func (m *model) has(r rule) bool { return m.Without&r == 0 }

func (m *model) majority() int { return m.Voters/2 + 1 }

// voterTicks is how long a voter's record lives. A tick is more than clock rates make out over a lease: with T·(1+2ρ)
// the record falls short of the lease by some microseconds when both clocks are off in the worst directions.
func (m *model) voterTicks() uint8 {
	if m.has(longRecord) {
		return m.Lease
	}
	return m.Lease - 1
}
