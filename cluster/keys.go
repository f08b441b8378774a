package cluster

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
)

// MaxKeys bounds the keys that a node has at a time.
const MaxKeys = 16

// ErrPlain is what comes of touching the keys where gossip is in plain text. A cluster cannot begin to encrypt while it
// runs.
var ErrPlain = errors.New("gossip is in plain text: start all nodes with keys (gossip-key-file)")

// Key is one that a node can read gossip with.
type Key struct {
	ID   string // see KeyID
	Used bool   // for writing
}

// KeyID stands for a key where it must not be told. The key cannot be worked out from it.
func KeyID(key []byte) string {
	sum := sha256.Sum256(append([]byte("weir gossip key\x00"), key...))
	return hex.EncodeToString(sum[:8])
}

// Keys lists the keys of this node, the one in use first; none where gossip is in plain text.
func (c *Cluster) Keys() []Key {
	c.keys.Lock()
	defer c.keys.Unlock()
	if c.keyring == nil {
		return nil
	}
	used := c.keyring.GetPrimaryKey()
	var keys []Key
	for _, k := range c.keyring.GetKeys() {
		keys = append(keys, Key{KeyID(k), bytes.Equal(k, used)})
	}
	return keys
}

// AddKey has this node read what is encrypted with a key. One that it has is no error.
func (c *Cluster) AddKey(key []byte) error {
	return c.changeKeys(KeyID(key), func(known []byte) error {
		if err := checkKey(key); err != nil {
			return fmt.Errorf("the key %w", err)
		}
		if known == nil && len(c.keyring.GetKeys()) >= MaxKeys {
			return fmt.Errorf("there are %d keys already: remove one first", MaxKeys)
		}
		return c.keyring.AddKey(bytes.Clone(key))
	})
}

// UseKey has this node encrypt with a key that it has. Members that lack it hear nothing from this node any more: that
// all have it is for the caller to know.
func (c *Cluster) UseKey(id string) error {
	return c.changeKeys(id, func(key []byte) error {
		if key == nil {
			return fmt.Errorf("this node has no key %s", id)
		}
		return c.keyring.UseKey(key)
	})
}

// RemoveKey has this node forget a key, which must not be the one in use here. That no other member uses it is for the
// caller to know. One that it does not have is no error.
func (c *Cluster) RemoveKey(id string) error {
	return c.changeKeys(id, func(key []byte) error {
		switch {
		case key == nil:
			return nil
		case bytes.Equal(key, c.keyring.GetPrimaryKey()):
			return fmt.Errorf("key %s is in use on this node", id)
		}
		return c.keyring.RemoveKey(key)
	})
}

// changeKeys calls change with the key of an id, nil where there is none, while no other goroutine uses the keyring.
func (c *Cluster) changeKeys(id string, change func(key []byte) error) error {
	c.keys.Lock()
	defer c.keys.Unlock()
	if c.keyring == nil {
		return ErrPlain
	}
	for _, k := range c.keyring.GetKeys() {
		if KeyID(k) == id {
			return change(k)
		}
	}
	return change(nil)
}

// Prove returns what shows a node that has this node's key for writing that a text is from one that has it too; nil
// where gossip is in plain text.
func (c *Cluster) Prove(text string) []byte {
	c.keys.Lock()
	defer c.keys.Unlock()
	if c.keyring == nil {
		return nil
	}
	return proof(c.keyring.GetPrimaryKey(), text)
}

// Proven reports whether a proof is Prove's for a text, by a node whose key this one has.
func (c *Cluster) Proven(text string, by []byte) bool {
	c.keys.Lock()
	defer c.keys.Unlock()
	return c.keyring != nil &&
		slices.ContainsFunc(c.keyring.GetKeys(), func(key []byte) bool { return hmac.Equal(proof(key, text), by) })
}

func proof(key []byte, text string) []byte {
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte("weir gossip key proof\x00" + text))
	return mac.Sum(nil)
}
