//! How guarded requests are named: all proxies of the store agree on it, and only a proxy that is alone can change
//! it.

use std::collections::BTreeMap;
use std::time::Duration;

use super::machine::{self, Renaming};
use super::{Fleet, Stage, naming_records, versions};
use crate::store::registry::View;

/// How long to wait for the records.
const READ: Duration = Duration::from_secs(5);

/// Why the naming of requests was not changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotNamed {
    /// Requests keep their old names.
    Refused(String),
    /// The store did not confirm whether the new names were recorded. Until it does, this proxy must grant neither by
    /// the old names, because another proxy may join with the new ones, nor by the new ones.
    Unknown(String),
}

impl Fleet {
    /// Whether guarded requests may be named by `naming`, judged without asking the store.
    ///
    /// # Errors
    /// The reason why not.
    pub async fn may_name(&self, naming: &BTreeMap<String, String>) -> Result<Renaming, String> {
        let own = versions(&*self.0.naming.lock().await);
        let view = self.0.view.borrow().clone();
        self.renaming(&view, &own, naming)
    }

    fn renaming(
        &self,
        view: &View,
        own: &machine::PolicyVersions,
        naming: &BTreeMap<String, String>,
    ) -> Result<Renaming, String> {
        let member = {
            let state = self.0.state.lock();
            (state.stage == Stage::Member).then_some(state.id)
        };
        machine::renaming(view, member, own, &versions(&naming_records(naming)))
    }

    /// Adopts the naming that the fleet has recorded, which [`Fleet::may_name`] found equal to `naming`.
    ///
    /// # Errors
    /// The reason why requests keep their old names.
    pub async fn follow_naming(&self, naming: &BTreeMap<String, String>) -> Result<(), String> {
        let mut own = self.0.naming.lock().await;
        let view = self.read().await.ok_or("the records of the fleet could not be read in time")?;
        match self.renaming(&view, &versions(&own), naming)? {
            Renaming::Recorded => {
                *own = naming_records(naming);
                Ok(())
            }
            Renaming::Alone => Err("the records of the fleet have changed meanwhile".to_owned()),
        }
    }

    /// Records a new naming of guarded requests, which only a fleet of one can do. The caller must ensure that no
    /// lease is left under a name that is no longer given, and that none is granted until this returns.
    pub async fn name_requests(&self, naming: &BTreeMap<String, String>) -> Result<(), NotNamed> {
        let records = naming_records(naming);
        let mut own = self.0.naming.lock().await;
        let id = self.0.state.lock().id;
        match self.0.registry.initialize(id, records.clone()).await {
            Ok(true) => {
                *own = records;
                self.0.hurry.notify_one();
                Ok(())
            }
            Ok(false) => {
                drop(own);
                let refused = || Err(NotNamed::Refused(machine::OTHERS.to_owned()));
                self.has_named(naming).await.unwrap_or_else(refused)
            }
            Err(error) => Err(NotNamed::Unknown(error.to_string())),
        }
    }

    /// The result of a [`Fleet::name_requests`] whose answer was lost. `None` if the result is not certain: the
    /// record is unchanged, but the write may still commit.
    ///
    /// The result is certain if the record shows the new naming, if another proxy may grant, or if this proxy was
    /// evicted. The last two need rows that the write keeps locked until it ends.
    pub async fn has_named(&self, naming: &BTreeMap<String, String>) -> Option<Result<(), NotNamed>> {
        let mut own = self.0.naming.lock().await;
        let Some(view) = self.read().await else {
            return Some(Err(NotNamed::Unknown("the records of the fleet could not be read".to_owned())));
        };
        let records = naming_records(naming);
        if machine::are_recorded(&view, &versions(&records)) {
            *own = records;
            return Some(Ok(()));
        }
        let own = versions(&own);
        self.renaming(&view, &own, naming).err().map(|why| Err(NotNamed::Refused(why)))
    }

    /// The records, read after this call.
    async fn read(&self) -> Option<View> {
        let mut views = self.0.view.subscribe();
        tokio::time::timeout(READ, self.0.fresh_view(&mut views)).await.ok()?;
        let view = views.borrow().clone();
        Some(view)
    }

    /// Makes the stores other than the table give tokens above all that they have given, because keys get other
    /// names.
    ///
    /// # Errors
    /// One of the stores cannot.
    pub async fn raise_tokens(&self) -> Result<(), String> {
        self.0.service.raise_tokens().await.map_err(|error| error.to_string())
    }
}
