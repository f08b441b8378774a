package cluster

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// protocol is the version of what nodes tell each other in gossip. Nodes of different versions reject each other.
const protocol = 3

// State is how far a member has come.
type State uint8

// The states of a member. The ring holds the active ones.
const (
	Joining State = 1 // has not claimed anything yet
	Active  State = 2
	Leaving State = 3 // still there, handing over
)

// String returns the state's name in lower case.
func (s State) String() string {
	switch s {
	case Joining:
		return "joining"
	case Active:
		return "active"
	case Leaving:
		return "leaving"
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// established reports whether a member in this state has taken its place before.
func (s State) established() bool { return s == Active || s == Leaving }

// identity is a process: a ring name and the boot that tells its process starts apart.
type identity struct {
	name string
	boot uint64
}

// String returns the gossip name.
func (i identity) String() string { return fmt.Sprintf("%s/%016x", i.name, i.boot) }

func parseIdentity(gossipName string) (identity, error) {
	name, digits, found := strings.Cut(gossipName, "/")
	if !found || len(digits) != 16 || CheckName(name) != nil {
		return identity{}, fmt.Errorf("%q is not the gossip name of a weir node", gossipName)
	}
	boot, err := strconv.ParseUint(digits, 16, 64)
	if err != nil {
		return identity{}, fmt.Errorf("%q is not the gossip name of a weir node", gossipName)
	}
	return identity{name, boot}, nil
}

// metadata is what a node tells about itself along with its name and address. Package binary reads and writes it, big
// endian. Protocol and State keep their place in every protocol version, so that a node which must reject another still
// sees whether that one is established. A later build of the same protocol may append fields.
type metadata struct {
	Protocol         uint8
	State            State
	_                uint32 // earlier builds have a number here
	Settings         uint64
	Policy           uint32
	Peer, HTTP, GRPC uint16 // ports; 0: none
	Voters           uint32 // fingerprint of the list; 0: none
	Envoy            uint32 // see Cluster.SetEnvoyHash
}

const (
	metadataMagic = 0x5745 // "WE", before the metadata
	headerLen     = 4      // bytes of magic, Protocol and State
)

func (m metadata) encode() []byte {
	b := binary.BigEndian.AppendUint16(nil, metadataMagic)
	b, _ = binary.Append(b, binary.BigEndian, m) // cannot fail: all fields have fixed sizes
	return b
}

// decodeMetadata reads what encode wrote. Of another protocol version it reads the header only.
func decodeMetadata(b []byte) (metadata, error) {
	if len(b) < headerLen || binary.BigEndian.Uint16(b) != metadataMagic {
		return metadata{}, errors.New("not the metadata of a weir node")
	}
	m := metadata{Protocol: b[2], State: State(b[3])}
	if m.State < Joining || m.State > Leaving {
		return metadata{}, fmt.Errorf("metadata with unknown state %d", b[3])
	}
	if m.Protocol != protocol {
		return m, nil
	}
	if _, err := binary.Decode(b[2:], binary.BigEndian, &m); err != nil {
		return metadata{}, fmt.Errorf("metadata of %d bytes: %w", len(b), err)
	}
	return m, nil
}

// votersFingerprint stands for a list of voters in any order. No list is 0, and only that.
func votersFingerprint(names []string) uint32 {
	if len(names) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(names))
	sum := sha256.Sum256([]byte("weir voters\x00" + strings.Join(sorted, "\x00"))) // no name has a zero byte
	return binary.BigEndian.Uint32(sum[:]) | 1
}
